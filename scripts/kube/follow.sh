#!/usr/bin/env bash
# The agent follows the pods that a real API server tells it of. Pods are objects alone, and their cgroups are made here
# as kubelet makes them. Called by scripts/kube.sh; needs root. TIDEGATE names another binary than this tree's.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/kube/checks.sh
work=$1
tidegate=$(realpath "${TIDEGATE:-$(scripts/target-dir.sh)/debug/tidegate}")
name=tidegate-kube-$$
node=node-a

skip() {
	echo "SKIP test-kube-follow: $1"
	exit 0
}
[ "$(id -u)" = 0 ] || skip "needs root"
tree=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
[ -n "$tree" ] || skip "needs cgroup v2"
export TIDEGATE_BPFFS=$work/bpf/store TIDEGATE_RUN_DIR=$work/run

cleanup() {
	if [ -n "${agent:-}" ]; then
		kill "$agent" 2>/dev/null || true
		wait "$agent" || true
	fi
	"$tidegate" detach >/dev/null 2>&1 || true
	umount "$work/bpf" || true
	find "$tree/$name" -depth -type d -exec rmdir {} +
}
mkdir -p "$work"/{bpf,files,run}
mount -t bpf -o mode=0700 bpf "$work/bpf"
mkdir "$tree/$name"
trap cleanup EXIT

pod() {
	jq --null-input --arg name "$1" --arg app "$2" --arg node "$node" '{ apiVersion: "v1", kind: "Pod",
		metadata: { name: $name, namespace: "prod", labels: { app: $app } },
		spec: { nodeName: $node, containers: [{ name: "it", image: "none" }] } }' |
		kubectl create --filename - >/dev/null
}
# The cgroups of a pod with driver systemd, or with the other one.
cgroups() {
	local uid
	uid=$(kubectl get pod "$1" --namespace prod --output jsonpath='{.metadata.uid}')
	case $2 in
	systemd) mkdir -p "$tree/$name/kubepods.slice/kubepods-pod${uid//-/_}.slice/cri-containerd-it.scope" ;;
	*) mkdir -p "$tree/$name/kubepods/besteffort/pod$uid/it" ;;
	esac
}
status() {
	"$tidegate" status --json | jq --exit-status "$1"
}
members() {
	status ".limits[] | select(.name == \"api\").members | length == $1"
}
has_rate() {
	status ".limits[] | select(.name == \"pod-prod_own\").egress.rate_bit_s == $1"
}
is_state() {
	status ".agent.engines[\"pods of node $node\"] | startswith(\"$1\")"
}
annotate() {
	kubectl annotate --namespace prod --overwrite pod "$@" >/dev/null
}

cat >"$work/files/limits.toml" <<-'END'
	annotations = true
	[[limit]]
	name   = "api"
	scope  = { pod = { namespace = "prod", labels = "app=api" } }
	egress = "8mbit"
END
kubectl create namespace prod >/dev/null
kubectl create serviceaccount default --namespace prod >/dev/null
"$tidegate" agent "$work/files" --kubernetes --node "$node" --kubeconfig "$KUBECONFIG" --below "$name" \
	--engine "$work/none.sock" >"$work/agent.log" 2>&1 &
agent=$!
expect "the API server tells it that there are no pods" until_true is_state connected
for each in "api-0 api" "api-1 api" "own own"; do
	# shellcheck disable=SC2086
	pod $each
done
cgroups api-0 systemd
cgroups api-1 cgroupfs
cgroups own systemd
expect "two replicas share a limit" until_true members 2
annotate own kubernetes.io/egress-bandwidth=10M
expect "a pod is limited by its annotation" until_true has_rate 10000000
annotate own kubernetes.io/egress-bandwidth=20Mi
expect "a changed annotation takes effect" until_true has_rate 20971520
kubectl label --namespace prod --overwrite pod api-1 app=other >/dev/null
expect "a changed label, too" until_true members 1
scripts/kube.sh down "$work/cluster"
expect "it says that the API server is away" until_true is_state away
expect "limits stay" members 1
expect "... and rates" has_rate 20971520
scripts/kube.sh up "$work/cluster"
annotate own kubernetes.io/egress-bandwidth-
expect "it goes on when the API server is back" until_true status '[.limits[].name] == ["api"]'
exit "$failed"
