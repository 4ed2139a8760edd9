#!/usr/bin/env bash
# Chart and kustomize are right, make the same objects, and a real API server takes these. Called by scripts/kube.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/kube/checks.sh
work=$1

# Each case of values that the chart has, and its defaults.
cases=(defaults)
echo "{}" >"$work/defaults.yaml"
for file in "$chart"/ci/*-values.yaml; do
	name=${file##*/}
	cases+=("${name%-values.yaml}")
	cp "$file" "$work/${name%-values.yaml}.yaml"
done

kubectl create namespace tidegate >/dev/null
for name in "${cases[@]}"; do
	values=(--values "$work/$name.yaml")
	expect "helm lint: $name" helm lint --strict "$chart" "${values[@]}"
	chart "${values[@]}" >"$work/chart-$name"
	expect "the API server would take the chart: $name" \
		kubectl apply --dry-run=server --validate=strict --filename "$work/chart-$name"
done
layer >"$work/base"
layer web >"$work/web"
for name in base web; do
	expect "the API server would take kustomize: $name" \
		kubectl apply --dry-run=server --validate=strict --filename "$work/$name"
done

wrong() {
	refuses "the chart refuses $1" "$2" helm template tidegate "$chart" "${@:3}"
}
wrong "an unknown value" "additional properties" --set privileged=true
wrong "a port that there is not" "web" --set web.port=65536
wrong "a file that the agent does not read" "does not match pattern" --set-string files.limits=x
wrong "two agents on a node" "maxSurge" --set updateStrategy.rollingUpdate.maxSurge=1
wrong "Kubernetes before 1.30" "kubeVersion" --kube-version 1.29.0
if chart --set-json files=null | grep '^data:' >/dev/null; then
	fail "without files there is no limit"
else
	pass "without files there is no limit"
fi

# The objects as the API server reads them, without what tells who made them.
objects() {
	kubectl apply --dry-run=server --output json --filename "$1" | jq --slurp '
		[.[] | if .kind == "List" then .items[] else . end | select(.kind != "Namespace")
			| .metadata |= del(.creationTimestamp, .uid, .resourceVersion, .managedFields, .generation, .annotations, .labels)]
			| sort_by(.kind, .metadata.name)' >"$2"
}
objects "$work/chart-defaults" "$work/from-helm"
objects "$work/base" "$work/from-kustomize"
same "chart and kustomize make the same objects" "$work/from-helm" "$work/from-kustomize"
chart --set web.enabled=true >"$work/chart-with-web"
objects "$work/chart-with-web" "$work/from-helm"
objects "$work/web" "$work/from-kustomize"
same "and with metrics" "$work/from-helm" "$work/from-kustomize"
if grep -q '"privileged": true' "$work"/from-*; then
	fail "no container is privileged"
else
	pass "no container is privileged"
fi

# Really.
expect "kustomize is applied" kubectl apply --filename "$work/base"
expect "again, it changes nothing" kubectl diff --filename "$work/base"
expect "with metrics, the DaemonSet changes" bash -c "kubectl apply --filename '$work/web' |
	grep --line-regexp 'daemonset.apps/tidegate configured'"
expect "it is deleted" kubectl delete --wait=false --filename "$work/web"
release=(tidegate "$chart" --namespace charted --create-namespace)
expect "the chart is installed" helm install "${release[@]}"
expect "it is upgraded" helm upgrade "${release[@]}" --set web.enabled=true
expect "the upgrade is there" bash -c "kubectl --namespace charted get daemonset tidegate --output json |
	jq --exit-status '[.spec.template.spec.containers[].name] == [\"agent\", \"web\"]'"
expect "it is uninstalled" helm uninstall tidegate --namespace charted
exit "$failed"
