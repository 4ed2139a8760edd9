#!/bin/sh
# What tidegate does in containers of podman: usage: scripts/podman.sh TIDEGATE. Needs root and podman; the
# containers' root is this machine's /usr. Prints SKIP where podman is missing; puts everything back.
set -eu

tidegate=$(realpath "${1:?usage: scripts/podman.sh TIDEGATE}")
if ! command -v podman > /dev/null; then
	echo "SKIP podman.sh: needs podman"
	exit 0
fi
root=$(mktemp -d)
name=tidegate-podman-$$
cleanup() {
	podman rm -f -t 0 "$name" > /dev/null 2>&1 || true
	"$tidegate" limit del "$name" > /dev/null 2>&1 || true
	if [ -n "${mounted-}" ]; then umount /sys/fs/bpf || true; fi
	rm -rf "$root"
}
trap cleanup EXIT
mkdir "$root/usr" "$root/tmp" "$root/etc" "$root/run" "$root/proc" "$root/sys" "$root/dev"
for dir in bin sbin lib lib64; do
	if [ -e "/usr/$dir" ]; then ln -s "usr/$dir" "$root/$dir"; fi
done
container() {
	podman run --rm --network none -v /usr:/usr:ro -v "$tidegate:/run/tidegate-bin:ro" "$@"
}
expect() {
	what=$1 want=$2
	shift 2
	said=$("$@" 2>&1) || true
	case $said in
	*"$want"*) echo "ok: $what" ;;
	*)
		echo "FAILED: $what: wanted \`$want\`, got: $said"
		exit 1
		;;
	esac
}

add="/run/tidegate-bin limit add $name --cgroup / --egress 50mbit"
# shellcheck disable=SC2086
expect "without privileges a limit is refused" "missing: CAP_" \
	container --rootfs "$root" $add
# shellcheck disable=SC2086
expect "a limit that would end with its container is refused" "first process of a container" \
	container --privileged --rootfs "$root" $add
expect "run works with privileges" "done" \
	container --privileged --rootfs "$root" /run/tidegate-bin run --egress 50mbit sh -c "echo done"
if ! grep -q " /sys/fs/bpf bpf " /proc/mounts; then
	mount -t bpf -o mode=0700 bpf /sys/fs/bpf
	mounted=1
fi
container -d --name "$name" --privileged -v /sys/fs/bpf:/sys/fs/bpf --rootfs "$root" \
	sleep 600 > /dev/null
# shellcheck disable=SC2086
expect "a limit is on" "is on /" podman exec "$name" $add
expect "the container sees its limit" "in force" podman exec "$name" /run/tidegate-bin status
expect "the host sees it" "in force" "$tidegate" limit show "$name"
podman exec "$name" /run/tidegate-bin limit del "$name" > /dev/null
expect "it is off" "$name" "$tidegate" limit del "$name"
