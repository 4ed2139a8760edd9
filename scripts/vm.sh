#!/usr/bin/env bash
# Virtual machines: the privileged tests on Debian's kernels 6.1, 6.12, 6.18 and 7.3, and the units and
# packages under systemd.
#
#   scripts/vm.sh all              every privileged test but those of the laboratory, on all four; then `port`
#                                  and `systemd`
#   scripts/vm.sh quick            the tests that tell most, on the oldest and the newest
#   scripts/vm.sh some TEXT...     those whose names hold one of these
#   scripts/vm.sh port             a machine behind a limited port of this one
#   scripts/vm.sh systemd NAME...  units and packages as shipped, with systemd as PID 1; scripts/vm/systemd.sh has more
#   scripts/vm.sh applications [ROW...]
#                                  rows of the experiment `applications` beside fq, fq_codel and CAKE, on 6.18
#   scripts/vm.sh node DIR         a node of Kubernetes, for scripts/kube.sh
#   scripts/vm.sh captures [NAME...]   captures of TCP that meets a policer, a queue or chance, for burst analyze
#   scripts/vm.sh shell V          a shell on kernel V
#
# KERNELS="6.12 7.3" takes these kernels alone. The newest Debian package of a series is taken. `applications` and
# `systemd` take the last of them, and SYSTEMS="pace,fq" limits with these alone. An emulated machine has no usable
# time, so of its report read the drops, the time-outs and the shares, not the latencies.
#
# A machine boots on this root file system, read-only, with virtme-ng. What it needs is installed by
# scripts/deps.sh (group vm) and kept below target/vm; this host's own apt is only asked where its mirror is.
# KVM is used where the kernel boots with it within half a minute. Elsewhere the machine is emulated, and its tests
# know that it is slow (TIDEGATE_TEST_SLOW). Each emulated machine takes one processor of this one, so as many as
# it has run at once, if its memory holds them.
#
# A test that fails is not run again. Where no machine can be had, this prints SKIP and why, and ends with 0. A
# test that cannot run prints SKIP itself. The whole output is in target/vm/KERNEL.log.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin"
root=$PWD
self=scripts/vm.sh

read -r -a kernels <<<"${KERNELS:-6.1 6.12 6.18 7.3}"
vm=$PWD/target/vm
virtme=1.42
memory=3G
form=${1:-}
[ "$form" != quick ] || [ -n "${KERNELS:-}" ] || kernels=("${kernels[0]}" "${kernels[-1]}")
cpus=2
in_memory=/run/programs
# Emulation is slow: a machine that has not ended by then hangs.
limit_all=150m
limit_quick=12m
limit_port=15m
limit_applications=90m
# The rows of `applications` where none is said. An emulated machine carries 50 Mbit/s.
rows=(nginx-close-10k-50m nginx-keep-10k-50m redis-50m)
# The oldest of these series on which `pace` holds the answers of servers.
applications_kernel=6.18
# The test of a machine behind a port, which has the name of its TAP device.
port_test=root_vm_behind_a_port_is_held
port_tap=tap0
# The tests of the quick form, as the harness matches them.
quick=(
	the_loaded_program_follows_the_table
	root_edt_a_newcomer_does_not_wait
	root_edt_limits_a_device
	root_tcp_over_ipv4_is_limited
	root_run_brings_dctcp
	root_acks_spring_knows_how_long_the_ack_waits
)

source scripts/debian.sh
source scripts/vm/kernels.sh
source scripts/vm/systemd.sh
source scripts/vm/captures.sh
source scripts/vm/node.sh

# The laboratory measures, and an emulated machine has no time of its own: of its tests these alone.
laboratory='root_netem_'

skip() {
	mkdir -p "$vm"
	echo "SKIP test-vm: $1" | tee "$vm/quick.log"
	[ "$form" = quick ] || echo "0 passed, 0 failed, 1 skipped"
	exit 0
}

prepare() {
	[ "$(uname -m)" = x86_64 ] || skip "the kernels are fetched for x86_64, and this is $(uname -m)"
	command -v apt-get >/dev/null || skip "Debian's kernels come through apt, and there is none here"
	scripts/deps.sh vm || skip "what the virtual machine needs cannot be installed (see above)"
	mkdir -p "$vm"
	if [ ! -x "$vm/venv/bin/vng" ]; then
		echo "Installing virtme-ng $virtme in target/vm/venv"
		{ python3 -m venv "$vm/venv" && "$vm/venv/bin/pip" --quiet install "virtme-ng==$virtme"; } \
			>"$vm/pip.log" 2>&1 || {
			rm -rf "$vm/venv"
			skip "virtme-ng cannot be installed: $(tail -n 1 "$vm/pip.log")"
		}
	fi
	export PATH="$vm/venv/bin:$PATH"
	local kernel
	for kernel in "${kernels[@]}"; do
		fetch_kernel "$kernel" || skip "no Debian package of kernel $kernel can be fetched"
	done
}

# Inside the machine: what programs of ours need.
guest_ready() {
	mount -t bpf bpf /sys/fs/bpf
	ip link set lo up
	modprobe --all --quiet tun veth || true
	mkdir "$in_memory"
	mount -t tmpfs -o mode=755 programs "$in_memory"
}

# Inside the machine: keeps a file in memory. The root file system has no cache in the guest, so that a large
# program would take seconds to start.
keep_in_memory() {
	cp "$1" "$in_memory/"
	mount --bind "$in_memory/${1##*/}" "$1"
}

# Inside the machine of a kernel: what tests.list says. A line of it is a directory, a binary and filters.
guest() {
	local out=$vm/$1/out code=0 threads=$cpus dir binary filters command
	# An emulated machine has the time of one processor, and a test that waits for it sees the machine stand still.
	[ -z "${TIDEGATE_TEST_SLOW:-}" ] || threads=1
	{
		guest_ready
		while read -r dir binary filters; do
			echo "     Running $binary"
			command=${binary%/deps/*}/tidegate
			mountpoint -q "$command" || keep_in_memory "$command"
			keep_in_memory "$binary"
			# shellcheck disable=SC2086
			(cd "$dir" && "$binary" $filters --show-output --test-threads "$threads") || code=1
			umount "$binary"
			rm "$in_memory/${binary##*/}"
		done <"$vm/tests.list"
	} >"$out/log" 2>&1 </dev/null
	echo "$code" >"$out/code"
}

# The test binaries, or those that cargo is told.
list_tests() {
	(($# > 0)) || set -- --workspace --lib --bins --tests
	cargo test "$@" --locked --no-run --message-format=json 2>/dev/null |
		python3 -c '
import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message.get("profile", {}).get("test"):
        print(os.path.dirname(message["manifest_path"]), message["executable"])
'
}

# Of the binaries that are listed, those with a test that one of the filters matches, with the filters. Each costs
# an emulated machine seconds.
select_tests() {
	local dir binary filters
	while read -r dir binary; do
		filters=("$@")
		[[ $dir != */lab || $* != root_ ]] || filters=("$laboratory")
		[ -z "$("$binary" "${filters[@]}" --list --format terse)" ] || echo "$dir $binary ${filters[*]}"
	done
}

# Boots the last kernel behind the TAP device in this network namespace, to run a test binary that takes orders.
port_machine() {
	export PATH="$vm/venv/bin:$PATH"
	cpus=1 memory=1G
	# Whoever ends this ends the machine.
	exec timeout --kill-after=10 "$limit_port" "$self" boot "${kernels[-1]}" --qemu-opts="$(
		printf -- '-netdev tap,id=port,ifname=%s,script=no,downscript=no ' "$port_tap"
		printf -- '-device virtio-net-pci,netdev=port'
	)" "$self" port_guest "${kernels[-1]}" "$1" >"$vm/boot-port.log" 2>&1 </dev/null
}

# Inside that machine.
port_guest() {
	local out=$vm/$1/out device
	{
		modprobe virtio_net
		device=$(ls /sys/class/net | grep -v -x lo | head -n 1)
		ip address add 10.96.0.2/24 dev "$device"
		ip link set "$device" up
		ip route add default via 10.96.0.1
		TIDEGATE_TEST_EDT=orders "$2" helper --exact --nocapture
	} >"$out/port.log" 2>&1 </dev/null
}

# A machine behind a port of this host, which is limited: this host's kernel, and the last of those above.
port() {
	local dir binary code=0
	read -r dir binary < <(list_tests --package tidegate --test e2e)
	echo "A machine of $(describe "${kernels[-1]}") behind a port of this one:"
	{
		echo "     Running $binary"
		# sudo passes no environment on.
		(cd "$dir" && "$root/scripts/bounded.sh" "$limit_port" \
			"$root/scripts/as-root.sh" env TIDEGATE_TEST_GUEST="$root/$self port_machine" \
			"$binary" "$port_test" --show-output)
	} >"$vm/port.log" 2>&1 </dev/null || code=1
	scripts/test-report.sh brief <"$vm/port.log"
	return "$code"
}

# Rows of the experiment `applications`, on the last kernel. The report is moved to target/vm/applications.
applications() {
	local kernel=${kernels[-1]} report=$vm/applications
	local out=$vm/$kernel/out
	cargo build --locked --bins
	rm -rf "$out" "$report"
	mkdir "$out"
	echo "Rows of \`applications\` on $(describe "$kernel"): $*"
	scripts/bounded.sh "$limit_applications" "$self" boot "$kernel" env SYSTEMS="${SYSTEMS:-}" \
		"$self" applications_guest "$kernel" "$(scripts/target-dir.sh)/debug" "$@" \
		>"$vm/boot-applications.log" 2>&1 </dev/null || true
	if [ ! -e "$out/applications/report.md" ]; then
		echo "  there is no report: target/vm/$kernel/out/log and target/vm/boot-applications.log may say why"
		return 1
	fi
	mv "$out/applications" "$report"
	echo "  target/vm/applications/report.md"
}

# Inside that machine: the directory of the programs, then the rows.
applications_guest() {
	local out=$vm/$1/out programs=$2 rows systems=()
	shift 2
	rows=$(IFS=, && echo "$*")
	[ -z "${SYSTEMS:-}" ] || systems=(--systems "$SYSTEMS")
	{
		guest_ready
		keep_in_memory "$programs/tidegate"
		keep_in_memory "$programs/tidegate-lab"
		"$programs/tidegate-lab" run applications --quick --only "$rows" "${systems[@]}" --out "$out"
	} >"$out/log" 2>&1 </dev/null
}

# How many emulated machines this one has processors and memory for.
machines_at_once() {
	awk -v cpus="$(nproc)" -v each_kb="$((${memory%G} << 20))" '
		$1 == "MemAvailable:" { n = int($2 / each_kb); print n < 1 ? 1 : n < cpus ? n : cpus }
	' /proc/meminfo
}

# Starts the machine of a kernel.
start() {
	local kernel=$1 out=$vm/$1/out command
	rm -rf "$out"
	mkdir "$out"
	command=("$self" guest "$kernel")
	# The machine gets the environment on its command line.
	runs_on_kvm "$kernel" || command=(env TIDEGATE_TEST_SLOW=1 "${command[@]}")
	scripts/bounded.sh "$limit" "$self" boot "$kernel" "${command[@]}" \
		>"$vm/boot-$kernel.log" 2>&1 </dev/null &
	machines[$kernel]=$!
}

# Waits for the machine of a kernel, and reports its tests. Ends with 1 if one failed.
finish() {
	local kernel=$1 out=$vm/$1/out code=1
	wait "${machines[$kernel]}" || true
	echo "Privileged tests on $(describe "$kernel"):"
	mv "$out/log" "$vm/$kernel.log" 2>/dev/null || cp "$vm/boot-$kernel.log" "$vm/$kernel.log"
	if [ -e "$out/code" ]; then
		code=$(cat "$out/code")
	else
		echo "  the machine stopped, did not end within $limit, or did not boot: target/vm/boot-$kernel.log"
	fi
	scripts/test-report.sh brief <"$vm/$kernel.log"
	return "$code"
}

run() {
	local limit=$1 kernel at_once finished=0 sum=0 logs=()
	local -A machines=()
	shift
	prepare
	list_tests | select_tests "$@" >"$vm/tests.list"
	if [ ! -s "$vm/tests.list" ]; then
		echo "No test has one of these in its name: $*" >&2
		return 1
	fi
	at_once=$(machines_at_once)
	! runs_on_kvm "${kernels[0]}" || at_once=1
	# Not with its status: where nothing is left to end, kill fails.
	trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
	for kernel in "${kernels[@]}"; do
		if ((${#machines[@]} - finished >= at_once)); then
			finish "${kernels[finished++]}" || sum=1
		fi
		start "$kernel"
		logs+=("$vm/$kernel.log")
	done
	for kernel in "${kernels[@]:finished}"; do
		finish "$kernel" || sum=1
	done
	if [ "$form" = all ]; then
		port || sum=1
		check_systemd || sum=1
		logs+=("$vm/port.log" "$vm/systemd.log")
	fi
	# The quick form is a part of `make test`, which has the sum.
	if [ "$form" = quick ]; then
		cat "${logs[@]}" >"$vm/quick.log"
	else
		scripts/test-report.sh sum "$sum" "${logs[@]}"
	fi
	return "$sum"
}

case "${1:-}" in
all) run "$limit_all" root_ ;;
quick) run "$limit_quick" "${quick[@]}" ;;
some)
	shift
	run "$limit_all" "$@"
	;;
port)
	prepare
	code=0
	port || code=$?
	scripts/test-report.sh sum "$code" "$vm/port.log"
	exit "$code"
	;;
applications)
	shift
	[ -n "${KERNELS:-}" ] || kernels=("$applications_kernel")
	kernels=("${kernels[-1]}")
	(($# == 0)) || rows=("$@")
	scripts/deps.sh build lab
	prepare
	applications "${rows[@]}"
	;;
systemd)
	shift
	[ -z "${KERNELS:-}" ] || systemd_kernel=${kernels[-1]}
	kernels=("$systemd_kernel")
	prepare
	code=0
	check_systemd "$@" || code=$?
	scripts/test-report.sh sum "$code" "$vm/systemd.log"
	exit "$code"
	;;
node)
	shift
	kernels=("$systemd_kernel")
	prepare
	node "$@"
	;;
captures)
	shift
	[ -n "${KERNELS:-}" ] || kernels=("$captures_kernel")
	prepare
	make_captures "$@"
	;;
shell)
	prepare
	boot "${2:-6.1}"
	;;
boot | boot_image | make_disk | guest | applications_guest | captures_guest | port_machine | port_guest)
	[[ $1 != boot* ]] || export PATH="$vm/venv/bin:$PATH"
	"$@"
	;;
*)
	sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
	exit 1
	;;
esac
