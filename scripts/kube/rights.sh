#!/usr/bin/env bash
# What the agent may ask the API server for, and which Pod Security level its pod needs. Called by scripts/kube.sh.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/kube/checks.sh
work=$1
url=$(cat "$work/cluster/url")

layer web >"$work/objects"
expect "deploy/kustomize is applied" kubectl apply --filename "$work/objects"
kubectl create namespace other >/dev/null
kubectl create serviceaccount bare --namespace other >/dev/null
kubectl create serviceaccount default --namespace other >/dev/null
agent=$(kubectl create token tidegate --namespace tidegate)
bare=$(kubectl create token bare --namespace other)

# All that the holder of a token may do in a namespace. kubectl may not read the schemas that it would check this by.
rules() {
	jq --null-input --arg namespace "$2" '{ apiVersion: "authorization.k8s.io/v1", kind: "SelfSubjectRulesReview",
		spec: { namespace: $namespace } }' |
		kubectl --token "$1" create --validate=false --output json --filename - |
		jq '.status | { resources: [.resourceRules[] | { verbs, apiGroups, resources, resourceNames }] | sort,
			others: .nonResourceRules | sort }'
}
echo '[{ "verbs": ["list", "watch"], "apiGroups": [""], "resources": ["pods"], "resourceNames": null }]' |
	jq . >"$work/wanted"
for namespace in tidegate other kube-system; do
	rules "$agent" "$namespace" >"$work/agents"
	rules "$bare" "$namespace" >"$work/bares"
	# What every account may do, such as asking who it is, is not of this binding.
	jq --slurp '.[0].resources - .[1].resources' "$work/agents" "$work/bares" >"$work/more"
	same "in namespace $namespace the agent may list and watch pods, and nothing more" "$work/wanted" "$work/more"
	same "and no more paths than another account" <(jq .others "$work/agents") <(jq .others "$work/bares")
done

# The status of a request of the agent.
ask() {
	curl --silent --show-error --max-time 20 --cacert "$work/cluster/ca.crt" --output "$work/answer" \
		--write-out '%{http_code}' --header "Authorization: Bearer $agent" \
		--header "Content-Type: ${type:-application/json}" --request "$1" "$url$2" "${@:3}"
}
answers() {
	local what=$1 wanted=$2 status
	status=$(ask "${@:3}") || true
	if [ "$status" = "$wanted" ]; then pass "$what"; else fail "$what: $status, $(head -c 300 "$work/answer")"; fi
}
pod() {
	jq --null-input --arg name "$1" --arg node "$2" '{ apiVersion: "v1", kind: "Pod",
		metadata: { name: $name, namespace: "other" },
		spec: { nodeName: $node, containers: [{ name: "it", image: "none" }] } }'
}
pod here node-a | kubectl create --filename - >/dev/null
pod there node-b | kubectl create --filename - >/dev/null
of_node="fieldSelector=spec.nodeName%3Dnode-a"
answers "it lists the pods of a node" 200 GET "/api/v1/pods?$of_node"
expect "these alone" jq --exit-status '[.items[].metadata.name] == ["here"]' "$work/answer"
answers "it watches the pods of a node" 200 GET "/api/v1/pods?watch=1&timeoutSeconds=1&$of_node"
expect "these alone" jq --slurp --exit-status '[.[].object.metadata.name] == ["here"]' "$work/answer"

pods=/api/v1/namespaces/other/pods
answers "it may not get a pod" 403 GET "$pods/here"
answers "... read its log" 403 GET "$pods/here/log"
answers "... run something in it" 403 POST "$pods/here/exec?command=id"
answers "... make one" 403 POST "$pods" --data "$(pod more node-a)"
answers "... delete one" 403 DELETE "$pods/here"
answers "... delete all" 403 DELETE "$pods"
answers "... replace its state" 403 PUT "$pods/here/status" --data "$(pod here node-a)"
type=application/merge-patch+json answers "... change its annotations" 403 PATCH "$pods/here" \
	--data '{ "metadata": { "annotations": { "a": "b" } } }'
for what in secrets configmaps serviceaccounts nodes namespaces services endpoints events; do
	answers "... list $what" 403 GET "/api/v1/$what"
done
answers "... read its own ConfigMap" 403 GET /api/v1/namespaces/tidegate/configmaps/tidegate
answers "... get a token" 403 POST /api/v1/namespaces/tidegate/serviceaccounts/tidegate/token --data '{
	"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {} }'
answers "... change its own rights" 403 DELETE /apis/rbac.authorization.k8s.io/v1/clusterroles/tidegate
agent=none answers "without its token it is nobody" 401 GET "/api/v1/pods?$of_node"

# A pod of the DaemonSet, as its controller would make it.
kubectl get daemonset tidegate --namespace tidegate --output json | jq '{ apiVersion: "v1", kind: "Pod",
	metadata: { name: "tidegate", labels: .spec.template.metadata.labels }, spec: .spec.template.spec }' >"$work/pod"
for level in privileged baseline restricted; do
	kubectl create namespace "$level" >/dev/null
	kubectl label namespace "$level" "pod-security.kubernetes.io/enforce=$level" >/dev/null
	kubectl create serviceaccount tidegate --namespace "$level" >/dev/null
	make=(kubectl create --dry-run=server --namespace "$level" --filename "$work/pod")
	case $level in
	privileged) expect "its pod passes Pod Security level $level" "${make[@]}" ;;
	*) refuses "its pod does not pass Pod Security level $level" "violates PodSecurity \"$level:latest\"" "${make[@]}" ;;
	esac
done
expect "its pod passes in its own namespace" \
	kubectl create --dry-run=server --namespace tidegate --filename "$work/pod"
exit "$failed"
