#!/usr/bin/env bash
# Runs the containers of the DaemonSet with runc, with the rights that it gives them and no more: capabilities, the
# runtimes' seccomp profile, mounts, namespaces, a read-only root, the token. The agent keeps to a cgroup and a store of
# this check. Called by scripts/kube.sh; needs root. TIDEGATE names another binary than this tree's.
#
# As containerd makes a container, the cgroup namespace is the container's own, and what the DaemonSet mounts at
# /sys/fs/cgroup stands in the place of the container's own tree. AppArmor and SELinux are not set.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/kube/checks.sh
work=$1
tidegate=$(realpath "${TIDEGATE:-$(scripts/target-dir.sh)/debug/tidegate}")
profile=/usr/share/containers/seccomp.json
name=tidegate-kube-$$
store=/sys/fs/bpf/$name run=/run/tidegate/$name

skip() {
	echo "SKIP test-kube-pod: $1"
	exit 0
}
[ "$(id -u)" = 0 ] || skip "needs root"
command -v runc >/dev/null || skip "needs runc"
[ -e "$profile" ] || skip "needs $profile (apt install golang-github-containers-common)"
tree=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
[ -n "$tree" ] || skip "needs cgroup v2"

cleanup() {
	local each
	for each in agent web; do
		runc delete --force "$name-$each" 2>/dev/null || true
	done
	"$tidegate" --bpffs "$store" --run-dir "$run" detach >/dev/null 2>&1 || true
	if [ -n "${sender:-}" ]; then
		kill "$sender" 2>/dev/null || true
		wait "$sender" || true
	fi
	for each in a b c/d c ''; do
		rmdir "$tree/$name/$each" 2>/dev/null || true
	done
	rm -rf "$run"
	[ -z "${mounted:-}" ] || umount /sys/fs/bpf
}
trap cleanup EXIT
if ! grep -q ' /sys/fs/bpf bpf ' /proc/mounts; then
	mount -t bpf -o mode=0700 bpf /sys/fs/bpf
	mounted=yes
fi
mkdir "$tree/$name" "$tree/$name/a"

layer web >"$work/objects"
kubectl apply --filename "$work/objects" >/dev/null
kubectl get daemonset tidegate --namespace tidegate --output json >"$work/daemonset"

# The volumes that are not the node's: ConfigMap and token, laid out as the kubelet does.
volumes=$work/volumes
mkdir -p "$volumes/files" "$volumes/token"
configure() {
	mkdir "$volumes/files/..$1"
	cat >"$volumes/files/..$1/limits.toml"
	ln -s "..$1" "$volumes/files/..data_tmp"
	mv --no-target-directory "$volumes/files/..data_tmp" "$volumes/files/..data"
	ln -sf ..data/limits.toml "$volumes/files/limits.toml"
}
limits() {
	cat <<-END
		annotations = true
		[[limit]]
		name   = "$name"
		scope  = { cgroup = "$name/*" }
		egress = "$1"
	END
}
limits 10mbit | configure 1
cp "$work/cluster/ca.crt" "$volumes/token/ca.crt"
kubectl create token tidegate --namespace tidegate >"$volumes/token/token"
echo -n tidegate >"$volumes/token/namespace"
chmod 0644 "$volumes"/token/*
chmod 0755 "$work" "$volumes" "$volumes/token"

# The root of the containers: the binary, and this machine's /usr for one that is not static.
root=$work/root
mkdir -p "$root"/{usr,etc/tidegate,run/tidegate,var/run/secrets/kubernetes.io/serviceaccount,proc,sys,dev}
install -m 755 "$tidegate" "$root/tidegate"
for each in bin sbin lib lib64; do
	[ ! -e "/usr/$each" ] || ln -s "usr/$each" "$root/$each"
done

# The configuration of a container for runc, as a runtime makes it of the pod. Further arguments are the program's.
bundle() {
	local container=$1 port
	port=$(cat "$work/cluster/url")
	shift
	mkdir -p "$work/$container"
	jq --arg container "$container" --arg root "$root" --arg volumes "$volumes" --arg name "$name" \
		--arg port "${port##*:}" --slurpfile profile "$profile" '
		.spec.template.spec as $pod
		| ($pod.containers[] | select(.name == $container)) as $c
		| [$c.securityContext.capabilities.add[] | "CAP_" + .] as $capabilities
		| {
			ociVersion: "1.0.2",
			root: { path: $root, readonly: $c.securityContext.readOnlyRootFilesystem },
			process: {
				user: { uid: 0, gid: 0 },
				args: (["/tidegate"] + [$c.args[] | gsub("\\$\\(HOST_IP\\)"; "127.0.0.1")] + $ARGS.positional),
				cwd: "/",
				env: ["PATH=/usr/bin", "NODE_NAME=" + $name, "KUBERNETES_SERVICE_HOST=127.0.0.1",
					"KUBERNETES_SERVICE_PORT=" + $port],
				noNewPrivileges: ($c.securityContext.allowPrivilegeEscalation | not),
				capabilities: { bounding: $capabilities, effective: $capabilities, permitted: $capabilities }
			},
			mounts: ([
				{ destination: "/proc", type: "proc", source: "proc", options: ["nosuid", "noexec", "nodev"] },
				{ destination: "/dev", type: "tmpfs", source: "tmpfs", options: ["nosuid", "mode=755", "size=65536k"] },
				{ destination: "/sys", type: "sysfs", source: "sysfs", options: ["nosuid", "noexec", "nodev", "ro"] },
				{ destination: "/usr", type: "bind", source: "/usr", options: ["rbind", "ro"] }
			] + [$c.volumeMounts[] as $m | ($pod.volumes[] | select(.name == $m.name)) as $v | {
				destination: $m.mountPath, type: "bind",
				source: ($v.hostPath.path // ($volumes + "/" + $m.name)),
				options: ["rbind", "rprivate", if $m.readOnly then "ro" else "rw" end]
			}]),
			linux: {
				cgroupsPath: ("/" + $name + "-" + $container),
				namespaces: ([{ type: "mount" }, { type: "ipc" }, { type: "cgroup" }]
					+ if $pod.hostPID then [] else [{ type: "pid" }] end
					+ if $pod.hostNetwork then [] else [{ type: "network" }] end),
				maskedPaths: ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
					"/proc/sched_debug", "/proc/scsi", "/sys/firmware"],
				readonlyPaths: ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
				seccomp: ($profile[0] | {
					defaultAction, defaultErrnoRet,
					architectures: ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
					syscalls: [.syscalls[]
						| select(((.includes.caps // []) - $capabilities) == []
							and all((.excludes.caps // [])[]; . as $cap | $capabilities | index($cap) == null)
							and ((.includes.arches // ["amd64"]) | index("amd64") != null)
							and ((.excludes.arches // []) | index("amd64") == null))
						| { names, action } + if .args then { args } else {} end
							+ if .errnoRet then { errnoRet } else {} end]
				} | with_entries(select(.value != null)))
			}
		}' --args -- "$@" <"$work/daemonset" >"$work/$container/config.json"
}

begin() {
	runc run --detach --bundle "$work/$1" --pid-file "$work/$1.pid" "$name-$1" >>"$work/$1.log" 2>&1 </dev/null
}
end() {
	kill "$(cat "$work/$1.pid")"
	timeout 30 tail --follow /dev/null --pid "$(cat "$work/$1.pid")"
	runc delete --force "$name-$1"
}
status() {
	"$tidegate" --bpffs "$store" --run-dir "$run" status --json | jq --exit-status "$1"
}
process() {
	sed -n "s/^$2:\t//p" "/proc/$(cat "$work/$1.pid")/status"
}
# How many bits are set in a number.
bits() {
	python3 -c 'import sys; print(bin(int(sys.argv[1], 16)).count("1"))' "$1"
}
in_force() {
	status ".limits[] | select(.name == \"$1\").state == \"in_force\""
}
has_rate() {
	status ".limits[] | select(.name == \"$name\").egress.rate_bit_s == $1"
}
members() {
	status ".limits[] | select(.name == \"$name\").members | length == $1"
}

own=(--bpffs "$store" --run-dir "$run")
bundle agent "${own[@]}" --below "$name"
begin agent
expect "the agent puts limits on" until_true in_force "$name"
expect "the API server tells it of the pods of its node" \
	until_true status ".agent.engines[\"pods of node $name\"] | startswith(\"connected\")"
if [ "$(bits "$(process agent CapEff)")" = "$(jq '.process.capabilities.bounding | length' "$work/agent/config.json")" ] &&
	[ "$(process agent NoNewPrivs) $(process agent Seccomp)" = "1 2" ]; then
	pass "it has the capabilities of the DaemonSet, gains none, and is under the seccomp profile"
else
	fail "it has other rights: $(grep -E '^(Cap|NoNew|Seccomp)' "/proc/$(cat "$work/agent.pid")/status" | tr '\n\t' ' =')"
fi
expect "it holds new cgroups" until_true status '.agent.gate.state == "open"'
mkdir "$tree/$name/b"
expect "a new cgroup joins" until_true members 2
limits 20mbit | configure 2
expect "a changed ConfigMap takes effect" until_true has_rate 20000000

# A program that runs in a cgroup beside others. Its path is read as process 1 sees it.
if readlink /proc/1/ns/cgroup >/dev/null; then
	cp /usr/bin/sleep "$work/sleeper"
	chmod 755 "$work/sleeper"
	mkdir "$tree/$name/c" "$tree/$name/c/d"
	(echo "$BASHPID" >"$tree/$name/c/d/cgroup.procs" && exec "$work/sleeper" 600) &
	sender=$!
	{
		limits 20mbit
		printf '[[limit]]\nname = "%s-exe"\nscope = { exe = "%s" }\negress = "5mbit"\n' "$name" "$work/sleeper"
	} | configure 3
	expect "a program is limited by its path" until_true in_force "$name-exe"
else
	echo "SKIP test-kube-exe: nobody may ask process 1 of this machine for its namespaces"
fi

end agent
expect "without the agent limits are in force" in_force "$name"
expect "... and nobody runs" status '.agent.running | not'
limits 20mbit | configure 4
begin agent
expect "the next one takes over" until_true status '.agent.running and .agent.gate.state == "open"'
expect "the limit is still the same" has_rate 20000000
expect "what the files no longer have is taken off" until_true status "[.limits[].name] == [\"$name\"]"

bundle web "${own[@]}"
begin web
port=$(jq '[.spec.template.spec.containers[].ports[]?.containerPort][0]' "$work/daemonset")
expect "the second container serves metrics" until_true bash -c "curl --silent http://127.0.0.1:$port/metrics |
	grep --fixed-strings 'tidegate_limit_in_force{limit=\"$name\"} 1'"
server=$(cat "/proc/$(cat "$work/web.pid")"/task/*/children | cut -d ' ' -f 1)
expect "... by a process without capabilities" grep --extended-regexp '^CapEff:.0+$' "/proc/$server/status"
end web
: | configure 5
expect "an empty ConfigMap takes all limits off" until_true status '.limits == []'
end agent
exit "$failed"
