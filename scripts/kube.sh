#!/usr/bin/env bash
# A control plane of Kubernetes on this machine, and what deploy/ is there: `make test-kube`.
#
#   scripts/kube.sh build [NAME...]  builds programs of Kubernetes, and helm, from their Go modules, below target/kube:
#                                    once, fifteen minutes on two processors
#   scripts/kube.sh up DIR           starts etcd and an API server on free ports of the loopback interface. Their data,
#                                    and what clients need, are in DIR: `kubeconfig` of an administrator, `ca.crt`, `url`.
#                                    Once more with the same DIR it has the same address and objects
#   scripts/kube.sh controllers DIR  starts the scheduler and some controllers, too: of DaemonSets and of accounts
#   scripts/kube.sh down DIR         ends them
#   scripts/kube.sh certify DIR NAME SUBJECT NAMES   a certificate that they accept
#   scripts/kube.sh test [NAME...]   the checks of scripts/kube/*.sh of these names, or objects, rights, pod and follow
#
# `node` boots a virtual machine with kubelet and containerd (`make test-kube-node`). Where that is emulated, the check
# takes half an hour. The other checks have no node: objects are checked, stored and watched, and nothing runs. The API
# server refuses `privileged`, as it does unless it is told otherwise.
#
# Where the parts cannot be had this prints SKIP and why, and ends with 0.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:/usr/sbin:/sbin"

kubernetes=v1.36.3
helm=v4.3.1
kube=$PWD/target/kube
bin=$kube/bin-$kubernetes-$helm
limit_build=60m
limit_test=15m
# An emulated node takes its time.
limit_node=120m
programs=(kube-apiserver kubectl helm)
programs_of_node=(kubelet kube-controller-manager kube-scheduler)
# An API server that is not ready by then hangs.
ready_s=180

skip() {
	echo "SKIP test-kube: $1"
	exit 0
}

# A program of a Go module whose requirements are those that are published.
build_kubernetes() {
	local name=$1 source=$kube/src-$kubernetes module twin=v0${kubernetes#v1} minor=${kubernetes#v1.} flags found
	if [ ! -e "$source/ready" ]; then
		found=$(cd "$kube" && go mod download -json "k8s.io/kubernetes@$kubernetes" | jq --raw-output .Dir)
		rm -rf "$source"
		cp -r --no-preserve=mode "$found" "$source"
		rm -f "$source"/go.work{,.sum}
		# What the project keeps in one repository with it is required as v0.0.0, and published by itself.
		(cd "$source" && go mod edit -json | jq --raw-output '.Require[] | select(.Version == "v0.0.0").Path' |
			while read -r module; do go mod edit "-replace=$module=$module@$twin"; done)
		touch "$source/ready"
	fi
	flags="-X k8s.io/component-base/version.gitVersion=$kubernetes -X k8s.io/component-base/version.gitMajor=1"
	flags+=" -X k8s.io/component-base/version.gitMinor=${minor%%.*}"
	(cd "$source" && GOFLAGS=-mod=mod go build -ldflags "$flags" -o "$bin/$name" "./cmd/$name")
}

build() {
	local name
	(($# > 0)) || set -- "${programs[@]}" "${programs_of_node[@]}"
	mkdir -p "$bin"
	for name in "$@"; do
		[ ! -x "$bin/$name" ] || continue
		echo "Building $name"
		case $name in
		helm) GOBIN=$bin go install "helm.sh/helm/${helm%%.*}/cmd/helm@$helm" ;;
		*) build_kubernetes "$name" ;;
		esac
	done
}

# What these checks need is there, or is built.
prepare() {
	local groups=(kube)
	[[ " $* " != *" node "* ]] || groups+=(vm)
	scripts/deps.sh "${groups[@]}" || skip "what it needs cannot be installed (see above)"
	command -v go >/dev/null || skip "Kubernetes is built from Go modules, and there is no go in PATH (https://go.dev/dl)"
	mkdir -p "$kube"
	[[ " $* " != *" node "* ]] || programs+=("${programs_of_node[@]}")
	scripts/bounded.sh "$limit_build" nice "$PWD/scripts/kube.sh" build "${programs[@]}" >"$kube/build.log" 2>&1 ||
		skip "Kubernetes cannot be built: $(tail -n 1 "$kube/build.log")"
}

free_ports() {
	python3 - "$1" <<-'END'
		import socket, sys
		sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
		for each in sockets:
		    each.bind(("127.0.0.1", 0))
		print(*[each.getsockname()[1] for each in sockets])
	END
}

# The certificate NAME.crt, signed by ca.crt, for who has this subject and these names.
certify() {
	local name=$2 subject=$3 names=$4
	cd "$1"
	openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "$subject" \
		-keyout "$name.key" -out "$name.csr" 2>/dev/null
	openssl x509 -req -in "$name.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 \
		-extfile <(echo "subjectAltName=$names") -out "$name.crt" 2>/dev/null
	rm "$name.csr"
}

# A file for kubectl, of who has this token.
kubeconfig() {
	cat <<-END
		apiVersion: v1
		kind: Config
		current-context: it
		contexts: [{ name: it, context: { cluster: it, user: it } }]
		clusters: [{ name: it, cluster: { server: "$(cat url)", certificate-authority: "$PWD/ca.crt" } }]
		users: [{ name: it, user: { token: "$1" } }]
	END
}

# Starts a program that outlives this script, with its output in NAME.log.
start() {
	local name=$1
	shift
	setsid "$@" >"$name.log" 2>&1 </dev/null &
	echo $! >"$name.pid"
}

runs() {
	# The id may be another process's by now.
	tr '\0' ' ' <"/proc/$(cat "$1.pid")/cmdline" 2>/dev/null | grep -q -F "$PWD/"
}

up() {
	local dir=$1 end client peer port token
	mkdir -p "$dir"
	cd "$dir"
	if [ -e apiserver.pid ] && runs apiserver; then
		echo "$dir: it runs" >&2
		return 1
	fi
	umask 077
	read -r client peer port < <(free_ports 3)
	if [ -e url ]; then
		port=$(sed 's/.*://' url)
	else
		echo "https://127.0.0.1:$port" >url
		openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=tests \
			-keyout ca.key -out ca.crt 2>/dev/null
		certify . server /CN=kubernetes "IP:127.0.0.1,IP:10.0.0.1,DNS:localhost,DNS:kubernetes.default.svc"
		openssl genrsa -out accounts.key 2048 2>/dev/null
		token=$(openssl rand -hex 16)
		echo "$token,admin,admin,system:masters" >tokens.csv
		kubeconfig "$token" >kubeconfig
	fi
	start etcd etcd --data-dir "$PWD/etcd" --listen-client-urls "http://127.0.0.1:$client" \
		--advertise-client-urls "http://127.0.0.1:$client" --listen-peer-urls "http://127.0.0.1:$peer" \
		--initial-advertise-peer-urls "http://127.0.0.1:$peer" --initial-cluster "default=http://127.0.0.1:$peer" \
		--unsafe-no-fsync
	start apiserver "$bin/kube-apiserver" --etcd-servers "http://127.0.0.1:$client" \
		--bind-address 127.0.0.1 --secure-port "$port" --advertise-address 192.0.2.1 --endpoint-reconciler-type none \
		--tls-cert-file "$PWD/server.crt" --tls-private-key-file "$PWD/server.key" --client-ca-file "$PWD/ca.crt" \
		--token-auth-file "$PWD/tokens.csv" --enable-admission-plugins NodeRestriction \
		--authorization-mode Node,RBAC --anonymous-auth=false \
		--service-account-issuer https://kubernetes.default.svc --service-cluster-ip-range 10.0.0.0/24 \
		--service-account-key-file "$PWD/accounts.key" --service-account-signing-key-file "$PWD/accounts.key"
	end=$((SECONDS + ready_s))
	until "$bin/kubectl" --kubeconfig kubeconfig get --raw /readyz >/dev/null 2>&1; do
		if ! runs etcd || ! runs apiserver || ((SECONDS > end)); then
			echo "the API server did not become ready: $PWD/apiserver.log, $PWD/etcd.log" >&2
			tail -n 3 apiserver.log etcd.log >&2
			cd "$OLDPWD" && down "$dir"
			return 1
		fi
		sleep 0.2
	done
}

controllers() {
	cd "$1"
	start controllers "$bin/kube-controller-manager" --kubeconfig "$PWD/kubeconfig" --leader-elect=false \
		--bind-address 127.0.0.1 --secure-port 0 --root-ca-file "$PWD/ca.crt" \
		--controllers daemonset-controller,serviceaccount-controller,root-ca-certificate-publisher-controller
	start scheduler "$bin/kube-scheduler" --kubeconfig "$PWD/kubeconfig" --leader-elect=false \
		--bind-address 127.0.0.1 --secure-port 0
}

down() {
	local name
	cd "$1" 2>/dev/null || return 0
	for name in scheduler controllers apiserver etcd; do
		[ -e "$name.pid" ] || continue
		if runs "$name"; then
			kill "$(cat "$name.pid")"
			timeout 30 tail --follow /dev/null --pid "$(cat "$name.pid")" || kill -KILL "$(cat "$name.pid")"
		fi
		rm "$name.pid"
	done
}

# Inside a bound of time: runs the checks, each with a control plane of its own.
checks() {
	local name code=0
	work=$(mktemp --directory)
	trap '(down "$work/cluster") || true; rm -rf "$work"' EXIT
	export KUBECONFIG=$work/cluster/kubeconfig PATH="$bin:$PATH"
	for name in "$@"; do
		echo "$name:"
		(up "$work/cluster") || return 1
		"scripts/kube/$name.sh" "$work" || code=1
		(down "$work/cluster")
		rm -rf "${work:?}"/*
	done
	return "$code"
}

case "${1:-}" in
build | up | controllers | down | certify | checks)
	"$@"
	;;
test)
	shift
	(($# > 0)) || set -- objects rights pod follow
	prepare "$@"
	[[ " $* " != *" node "* ]] || limit_test=$limit_node
	scripts/bounded.sh "$limit_test" "$PWD/scripts/kube.sh" checks "$@"
	;;
*)
	sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
	exit 1
	;;
esac
