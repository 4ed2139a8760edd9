#!/usr/bin/env bash
# A node with kubelet and containerd, in a virtual machine: the DaemonSet of the chart runs there and limits pods from
# their first bytes on. Judged by the bytes that pass their interfaces, and those that limits count. Called by
# scripts/kube.sh; needs root. TIDEGATE names another binary than this tree's.
#
# Controller and scheduler make the pod of the DaemonSet. The pods that it limits are made here, for this node.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/kube/checks.sh
work=$1
tidegate=$(realpath "${TIDEGATE:-$(scripts/target-dir.sh)/debug/tidegate}")
node=node-a
source scripts/kube/machine.sh
# To load the programs of a limit takes an emulated machine a minute.
deadline_s=600 look_s=1
rate_bit_s=400000

skip() {
	echo "SKIP test-kube-node: $1"
	exit 0
}
[ "$(id -u)" = 0 ] || skip "needs root"
[ "$(uname -m)" = x86_64 ] || skip "its machine is one of x86_64"
command -v busybox >/dev/null || skip "needs busybox (apt install busybox-static)"

finish() {
	if (($? || failed)); then
		on_node tell || tail -n 30 "$work/machine.log"
	fi
	stop_machine
}

# The UIDs of pods, which are needed while the API server is away, too.
declare -A uids
# A pod of this node. The rest is jq's, and changes it.
pod() {
	uids[$1]=$(jq --null-input --arg name "$1" --arg node "$node" '
		def container($name; $script): { name: $name, image: "busybox:1", imagePullPolicy: "Never",
			command: ["sh", "-c", $script] };
		def again($script): "while :; do \($script); sleep 1; done";
		def sends($to): container("out"; again("nc \($to) 9 </dev/zero"));
		def receives($from): container("in"; again("nc \($from) 10 >/dev/null"));
		{ apiVersion: "v1", kind: "Pod", metadata: { name: $name, namespace: "prod" },
			spec: { nodeName: $node, terminationGracePeriodSeconds: 0, automountServiceAccountToken: false,
				dnsPolicy: "Default" } }
		| '"$2" | kubectl create --filename - --output "jsonpath={.metadata.uid}")
}
of_pod() {
	kubectl get pod "$1" --namespace prod --output "jsonpath={$2}" | grep .
}
# The DaemonSet, with an image of this version.
install_agent() {
	chart --values "$work/values.yaml" --set-string image.tag="$1" | kubectl apply --filename - >/dev/null
}
# One pod of it is there, is of this version and is ready.
runs_version() {
	kubectl get pods --namespace tidegate --output json | jq --exit-status --arg image "tidegate:$1" '.items
		| length == 1 and (.[0] | .spec.containers[0].image == $image
			and any(.status.conditions[]; .type == "Ready" and .status == "True"))'
}

status() {
	on_node tidegate status --json | jq --exit-status "$1"
}
in_force() {
	status ".limits[] | select(.name == \"$1\").state == \"in_force\""
}
has_rate() {
	status ".limits[] | select(.name == \"$1\").egress.rate_bit_s == $2"
}
is_state() {
	status ".agent.engines[\"pods of node $node\"] | startswith(\"$1\")"
}
names() {
	printf '%s\n' "$@" | jq --raw-input --null-input --compact-output '[inputs]'
}
# The cgroups of a limit are those that kubelet has made for these pods.
has_pods() {
	local name=$1 each path paths=()
	shift
	for each in "$@"; do
		path=$(on_node cgroup_of "${uids[$each]}") && paths+=("$path") || return 1
	done
	status ".limits[] | select(.name == \"$name\").members | sort == ($(names "${paths[@]}") | sort)"
}

# Keeps what has passed these pods, and what limits have counted, under a name.
look() {
	local file=$work/$1.json each pods=()
	shift
	for each in "$@"; do
		pods+=("$each=${uids[$each]}")
	done
	on_node look "${pods[@]}" >"$file"
}
# So many bytes more leave a pod.
sends() {
	on_node sends "${uids[$1]}" "$2"
}
# A pod has received so many bytes.
receives() {
	on_node receives "${uids[$1]}" "$2"
}
judge() {
	jq --null-input --exit-status --raw-output -L scripts/kube "include \"looks\"; $1" "${@:2}"
}
# All has been counted but what a new pod may send and receive.
in_time() {
	local file=$1 name=$2
	shift 2
	judge "\$look[0] | uncounted(\"$name\"; $(names "$@"))
		| \"\(.) bytes\", . <= $# * start_bytes + other_bytes" \
		--slurpfile look "$work/$file.json"
}
# From one look to the next the limit has counted all, and it is not more than the limit allows.
held() {
	local before=$1 after=$2 name=$3 directions=$4
	shift 4
	judge "held(\$before[0]; \$after[0]; \"$name\"; $(names "$@"); $rate_bit_s; $directions)
		| (.[] | \"\(.direction): \(.bytes) bytes of \(.may | floor), \(.counted) counted\"), all(.held)" \
		--slurpfile before "$work/$before.json" --slurpfile after "$work/$after.json"
}

# A judgement holds. Says what it found.
judged() {
	local what=$1 said
	shift
	if said=$("$@" 2>&1); then
		pass "$what ($(sed '$d' <<<"$said" | paste --serial --delimiters ';'))"
	else
		fail "$what: $said"
	fi
}

trap finish EXIT
scripts/kube.sh controllers "$work/cluster"
if ! start_machine; then
	reason=$(sed -n 's/^SKIP test-vm: //p' "$work/machine.log")
	[ -z "$reason" ] || skip "$reason"
	fail "a node boots: $(tail -n 3 "$work/machine.log")"
	exit 1
fi
expect "kubelet joins, and its network is ready" \
	until_true kubectl wait "node/$node" --for condition=Ready --timeout 1s

cat >"$work/values.yaml" <<-END
	image: { pullPolicy: Never }
	extraArgs: ["--deadline=${deadline_s}s"]
	files:
	  limits.toml: |
	    annotations = true
	    [[limit]]
	    name   = "uploads"
	    scope  = { pod = { namespace = "prod", join = true } }
	    egress = "${rate_bit_s}bit"
	    [[limit]]
	    name   = "kinds"
	    scope  = { pod = { namespace = "prod", labels = "kind" } }
	    egress = "${rate_bit_s}bit"
END
kubectl create namespace tidegate >/dev/null
kubectl create namespace prod >/dev/null
pod server '.spec.containers = [container("sink"; "exec nc -ll -p 9 -e dd of=/dev/null bs=64k"),
	container("source"; "exec nc -ll -p 10 -e cat /dev/zero")]'
install_agent 1
expect "the pod of the DaemonSet runs" until_true runs_version 1
expect "the API server tells it of the pods of its node" until_true is_state connected
expect "it holds new pods" until_true status '.agent.gate.state == "open"'

# Pods with annotations: they exchange bytes with the net beyond the node, with the node, and with another pod.
expect "a pod gets an address" until_true of_pod server .status.podIP
for each in abroad:10.98.0.2 node:10.88.0.1 "pod:$(of_pod server .status.podIP)"; do
	pod "${each%%:*}" ".spec.containers = [sends(\"${each#*:}\"), receives(\"${each#*:}\")]
		| .metadata.annotations = { \"kubernetes.io/egress-bandwidth\": \"$rate_bit_s\",
			\"kubernetes.io/ingress-bandwidth\": \"$rate_bit_s\" }"
done
uploads=(upload-0 upload-1)
for each in "${uploads[@]}"; do
	pod "$each" '.spec.containers = [sends("10.98.0.2")] | .metadata.annotations = { "tidegate.dev/limit": "uploads" }'
done
# What kubelet makes of classes, of containers that come before and beside others, and of the node's network.
kinds=(guaranteed burstable stages host)
pod guaranteed '.spec.containers = [sends("10.98.0.2") | .resources.limits = { cpu: "500m", memory: "64Mi" }]
	| .metadata.labels = { kind: "it" }'
pod burstable '.spec.containers = [sends("10.98.0.2") | .resources.requests = { memory: "16Mi" }]
	| .metadata.labels = { kind: "it" }'
pod stages '.spec.initContainers = [container("before"; "dd if=/dev/zero bs=1000 count=200 | nc 10.98.0.2 9"),
		(container("beside"; again("nc 10.98.0.2 9 </dev/zero")) | .restartPolicy = "Always")]
	| .spec.containers = [sends("10.98.0.2")] | .metadata.labels = { kind: "it" }'
pod host '.spec.containers = [sends("10.98.0.2")] | .spec.hostNetwork = true | .metadata.labels = { kind: "it" }'

for each in abroad node pod; do
	expect "a pod that talks to $each is limited as its annotations say" until_true in_force "pod-prod_$each"
	expect "... it sends" sends "$each" 50000
	expect "... it receives" receives "$each" 50000
	look first "$each"
	judged "... it was limited before it had sent and received 64 KiB" in_time first "pod-prod_$each" "$each"
	expect "... it goes on" sends "$each" 200000
	look next "$each"
	judged "... and all that it sends and receives is held" \
		held first next "pod-prod_$each" '["out", "in"]' "$each"
done

expect "two replicas join a limit" until_true has_pods uploads "${uploads[@]}"
for each in "${uploads[@]}"; do
	expect "... one sends" sends "$each" 50000
done
look first "${uploads[@]}"
judged "... they were limited before each had sent 64 KiB" in_time first uploads "${uploads[@]}"
for each in "${uploads[@]}"; do
	expect "... one goes on" sends "$each" 100000
done
look next "${uploads[@]}"
judged "... and share one ceiling" held first next uploads '["out"]' "${uploads[@]}"

expect "the cgroups of pods of every kind are found" until_true has_pods kinds "${kinds[@]}"
expect "... the last container of one runs" \
	until_true kubectl wait pod/stages --namespace prod --for condition=Ready --timeout 1s
for each in "${kinds[@]}"; do
	expect "... $each sends" sends "$each" 20000
done
look first "${kinds[@]}"
judged "... they were limited before each had sent 64 KiB" in_time first kinds "${kinds[@]}"
for each in "${kinds[@]}"; do
	expect "... $each goes on" sends "$each" 20000
done
look next "${kinds[@]}"
judged "... and share one ceiling" held first next kinds '["out"]' "${kinds[@]}"
kubectl delete pod --namespace prod "${kinds[@]}" "${uploads[@]}" --wait=false >/dev/null

look first node pod
scripts/kube.sh down "$work/cluster"
expect "the agent says that the API server is away" until_true is_state away
expect "... a pod goes on" sends node 100000
look next node pod
for each in node pod; do
	judged "... $each is held" held first next "pod-prod_$each" '["out", "in"]' "$each"
done
scripts/kube.sh up "$work/cluster"
scripts/kube.sh controllers "$work/cluster"
kubectl annotate pod abroad --namespace prod --overwrite kubernetes.io/egress-bandwidth=800k >/dev/null
expect "a change takes effect when the API server is back" until_true has_rate pod-prod_abroad 800000

on_node 'cp /usr/bin/sleep /usr/local/bin/program && systemd-run --quiet /usr/local/bin/program infinity'
cat >>"$work/values.yaml" <<-END
	    [[limit]]
	    name   = "program"
	    scope  = { exe = "/usr/local/bin/program" }
	    egress = "${rate_bit_s}bit"
END
look first node pod
install_agent 2
expect "a newer version takes the place of the DaemonSet's pod" until_true runs_version 2
expect "... and follows the pods" until_true is_state connected
expect "... new pods are held again" until_true status '.agent.gate.state == "open"'
expect "... a pod goes on" sends node 100000
look next node pod
for each in node pod; do
	judged "... $each was held all the time" held first next "pod-prod_$each" '["out", "in"]' "$each"
done
kubectl annotate pod abroad --namespace prod --overwrite kubernetes.io/egress-bandwidth=600k >/dev/null
expect "... a change takes effect" until_true has_rate pod-prod_abroad 600000
expect "... and a program is limited by its path" until_true in_force program
exit "$failed"
