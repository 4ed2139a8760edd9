#!/usr/bin/env bash
# Inside a machine with systemd, and with the package installed: limits on containers of Podman, of root and of a
# user, or with the word `docker` on those of Docker.
#
#   name       the container `web` is limited by its name, and restarts twenty times
#   label      a container brings its rate in a label, and restarts
#   user_name  a user's container is limited by its name, and restarts twenty times
#   user_label a user's container brings its rate
#   never      a container that does not come waits, and keeps nobody away
#   away       the engine's socket goes away and comes back; the limit holds. Docker's containers end and start with it
#   wrong      one wrong limit of five: the other four are in force
#   twice      of two limits on one container the first has it, and the other says so
#   pull       an image pull is held, as docs/recipes.md says: by a unit NAME-image.service, or with dockerd
#   many       200 containers (40 on an emulated machine) with one label start as fast as they can, and share a limit
#
# Of Docker: name, label, away, pull, and
#
#   cri        a pull that Kubernetes asks of containerd is held
#   live       with `live-restore` containers go on without dockerd, and so does their limit
#
# A container runs on this machine's /usr and in its network, and sends to the peer without an end.
set -uo pipefail

here=${BASH_SOURCE%/*}
source "$here/checks.sh"
source "$here/traffic.sh"

checks=(name label user_name user_label never away wrong twice pull many)
[ "$word" != docker ] || checks=(name label away pull cri live)
prefix=$word
# Who runs containers: root with Podman or Docker.
root=of_podman
[ "$word" != docker ] || root=of_docker
many=200
# An emulated machine is slow, and has a bound (limit_systemd).
[ -z "$emulated" ] || many=40
user=anna
rules=/etc/tidegate/test.toml
image=/var/lib/checks-image
# A registry at the peer, and an image of random bytes in it.
registry=10.98.0.2:5000
pulled=$registry/random:1
pulled_bytes=2000000

setup() {
	:
}

prepare() {
	local dir
	be_patient
	useradd --create-home "$user"
	mkdir -p "$image"/{usr,tmp,etc,run,proc,sys,dev}
	for dir in bin sbin lib lib64; do
		[ ! -e "/usr/$dir" ] || ln -s "usr/$dir" "$image/$dir"
	done
	chmod -R a+rX "$image"
	net_up
	systemd-run --unit sink ip netns exec peer socat -u TCP-LISTEN:9,reuseaddr,fork OPEN:/dev/null
	dpkg --install /root/tidegate-1.deb
	if [ "$word" = docker ]; then
		mkdir -p /etc/docker
		# Containers are in this machine's network, and their images take no space that counts.
		echo '{ "bridge": "none", "iptables": false, "ip6tables": false, "storage-driver": "vfs",' \
			"\"insecure-registries\": [\"$registry\"] }" >/etc/docker/daemon.json
		# By HTTP, too.
		mkdir -p "/etc/containerd/certs.d/$registry"
		printf '%s\n' 'version = 2' '[plugins."io.containerd.grpc.v1.cri".registry]' \
			'config_path = "/etc/containerd/certs.d"' >/etc/containerd/config.toml
		echo "[host.\"http://$registry\"]" >"/etc/containerd/certs.d/$registry/hosts.toml"
		systemctl start docker.service
		tar --create --directory "$image" . | docker import - checks
		docker version
		return
	fi
	podman version
	systemctl start podman.socket
	loginctl enable-linger "$user"
	until_true test -S "/run/user/$(id -u "$user")/bus"
	as_user systemctl --user start podman.socket
}

as_user() {
	local id
	id=$(id -u "$user")
	(cd / && exec runuser -u "$user" -- env "XDG_RUNTIME_DIR=/run/user/$id" \
		"DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/$id/bus" "$@")
}

of_podman() {
	podman "$@"
}

of_docker() {
	docker "$@"
}

of_user() {
	as_user podman "$@"
}

# A container that sends, of one of these; options follow its name. Its first process ends by SIGKILL alone.
starts() {
	local who=$1 name=$2 from=(--rootfs "$image")
	# Its profile for AppArmor needs a parser that is not here.
	[ "$who" != of_docker ] || from=(--security-opt apparmor=unconfined checks)
	shift 2
	"$who" run --detach --name "$name" --network host --stop-timeout 0 --volume /usr:/usr:ro "$@" "${from[@]}" \
		socat -u OPEN:/dev/zero TCP:10.98.0.2:9
}

gone() {
	# For who looks into a failure.
	"$1" inspect --format '{{json .State}}' "$2"
	"$1" logs "$2"
	"$1" kill "$2"
	"$1" rm --force "$2"
	rm -f "$rules"
}

# The container starts, is limited by the limit NAME, and is limited again each of the times that it restarts.
follows() {
	local who=$1 container=$2 name=$3 restarts=$4 i
	shift 4
	starts "$who" "$container" "$@" && until_true in_force "$name" && flows && mark "$name" || return 1
	for ((i = 0; i < restarts; i++)); do
		"$who" restart --time 0 "$container" && flows || return 1
	done
	until_true in_force "$name" && held "$restarts" && in_time "$name" "$restarts"
}

by_name() {
	local code=0
	rule web 'container = "web"' >"$rules"
	until_true says web waiting 'no container `web` runs' && follows "$1" web web 20 || code=1
	gone "$1" web
	((code == 0)) && until_true no_limits
}

by_label() {
	local code=0
	echo "labels = true" >"$rules"
	follows "$1" rated container-rated 3 --label "tidegate.egress=${rate_bit_s}bit" || code=1
	gone "$1" rated
	((code == 0)) && until_true no_limits
}

check_name() {
	by_name "$root"
}

check_label() {
	by_label "$root"
}

check_user_name() {
	by_name of_user
}

check_user_label() {
	by_label of_user
}

no_limits() {
	tidegate status --json | jq -e '.limits == []' >/dev/null
}

check_never() {
	local code=0
	{
		rule never 'container = "never"'
		rule web 'container = "web"'
	} >"$rules"
	starts "$root" web && until_true in_force web && says never waiting 'no container `never` runs' &&
		tidegate status --check || code=1
	gone "$root" web
	return "$code"
}

# What the agent says of the engine begins so.
engine() {
	tidegate status --json | jq -e --arg socket "$1" --arg word "$2" \
		'.agent.engines[$socket] // "" | startswith($word)' >/dev/null
}

# The engine's socket goes away and comes back. Containers go on meanwhile, or end with the engine, which starts them
# again when it comes back (`end`).
away() {
	local code=0 count=1 socket=/run/podman/podman.sock units=(podman.socket podman.service)
	[ "$word" != docker ] || socket=/run/docker.sock units=(docker.socket docker.service)
	rule web 'container = "web"' >"$rules"
	starts "$root" web --restart unless-stopped && until_true in_force web && flows && mark web &&
		systemctl stop "${units[@]}" && until_true engine "$socket" away || code=1
	if [ "${1:-}" = end ]; then
		count=2
		((code == 0)) && until_true says web waiting || code=1
	else
		((code == 0)) && in_force web && flows && held || code=1
	fi
	systemctl start "${units[0]}"
	[ "$word" != docker ] || systemctl start docker.service
	((code == 0)) && until_true engine "$socket" running && until_true in_force web && flows &&
		"$root" restart --time 0 web && flows && until_true in_force web && held "$count" && in_time web "$count" ||
		code=1
	gone "$root" web
	return "$code"
}

check_away() {
	if [ "$word" = docker ]; then away end; else away; fi
}

check_live() {
	local settings=/etc/docker/daemon.json
	jq '. + { "live-restore": true }' "$settings" >/run/settings && cp /run/settings "$settings" &&
		systemctl reload docker.service && away
}

check_wrong() {
	local code=0 n
	{
		rule web 'container = "web"'
		rule sink 'unit = "sink.service"'
		rule wrong 'unit = "wrong.service"' 20mbps
		rule users 'slice = "user.slice"'
		rule bus 'unit = "dbus.service"'
	} >"$rules"
	systemctl restart tidegate-agent
	starts "$root" web || code=1
	for n in web sink users bus; do
		until_true in_force "$n" || code=1
	done
	tidegate status --json | jq -e '.agent.errors[0] | contains("limit `wrong`: egress")' || code=1
	tidegate status --check
	[ $? = 3 ] || code=1
	gone "$root" web
	return "$code"
}

check_twice() {
	local code=0
	{
		rule web 'container = "web"'
		rule again 'container = { labels = "app=web" }'
	} >"$rules"
	starts "$root" web --label app=web && until_true in_force web &&
		until_true says again refused 'limits `web` and `again` both match cgroup' && in_force web || code=1
	gone "$root" web
	return "$code"
}

# The peer has a registry with the image, and the engine has it no more.
publish() {
	local settings=/run/registry.yml content=/run/pulled insecure=(--tls-verify=false)
	[ "$word" != docker ] || insecure=()
	printf '%s\n' 'version: 0.1' 'storage:' '  filesystem:' '    rootdirectory: /var/lib/registry' 'http:' \
		"  addr: $registry" >"$settings"
	mkdir -p "$content"
	head -c "$pulled_bytes" /dev/urandom >"$content/random"
	systemd-run --unit registry ip netns exec peer docker-registry serve "$settings" &&
		until_true bash -c ": </dev/tcp/${registry/://}" &&
		tar --create --directory "$content" . | "$root" import - "$pulled" &&
		"$root" push "${insecure[@]}" "$pulled" && "$root" rmi "$pulled"
}

pulls() {
	if [ "$word" = docker ]; then
		docker pull "$pulled"
	else
		systemd-run --unit web-image --wait podman pull --tls-verify=false "$pulled"
	fi
}

# As the kubelet asks: by gRPC, whose message is here the name of an image, in an image, in a request.
cri_pulls() {
	local message=/run/message n=${#pulled}
	printf "$(printf '\\0\\0\\0\\0\\x%02x\\n\\x%02x\\n\\x%02x' $((n + 4)) $((n + 2)) "$n")%s" "$pulled" >"$message"
	curl --silent --show-error --http2-prior-knowledge --unix-socket /run/containerd/containerd.sock \
		--header 'content-type: application/grpc' --header 'te: trailers' --data-binary @"$message" --output /run/answer \
		--dump-header /dev/stderr http://x/runtime.v1.ImageService/PullImage &&
		ctr --namespace k8s.io image list --quiet | grep -qx "$pulled"
}

# The limit of a unit holds a pull.
holds_pull() {
	local unit=$1 pull=$2 code=0 from before
	publish || return 1
	rule pulls "unit = \"$unit\"" 100mbit "ingress = \"${rate_bit_s}bit\"" >"$rules"
	if systemctl is-active "$unit"; then until_true in_force pulls; else until_true says pulls waiting; fi || code=1
	from=$(uptime_s) before=$(arrived)
	((code)) || "$pull" && within $(($(arrived) - before)) "$from" "$start_bytes" &&
		(($(arrived) - before >= pulled_bytes)) || code=1
	systemctl stop registry.service
	rm -f "$rules"
	((code == 0)) && until_true no_limits
}

check_pull() {
	local unit=*-image.service
	[ "$word" != docker ] || unit=docker.service
	holds_pull "$unit" pulls || return 1
	"$root" rmi "$pulled"
}

check_cri() {
	holds_pull containerd.service cri_pulls
}

# The limit is on so many cgroups.
holds_cgroups() {
	tidegate status --json | jq -e --arg name "$1" --argjson count "$2" \
		'.agent.limits[] | select(.name == $name) | .cgroups | length == $count' >/dev/null
}

check_many() {
	local code=0 n
	rule many 'container = { labels = "app=many" }' >"$rules"
	until_true says many waiting && mark many || code=1
	# As many at once as this machine has memory for.
	export -f starts of_podman
	export image
	seq "$many" | xargs -P 8 -I '{}' bash -c 'starts of_podman many-{} --label app=many --log-driver none' || code=1
	((code)) || until_true holds_cgroups many "$many" && flows && held "$many" && in_time many "$many" || code=1
	tidegate status --json | jq '.agent.gate'
	podman kill --all >/dev/null
	podman rm --all --force >/dev/null
	rm -f "$rules"
	((code == 0)) && until_true no_limits
}

if [ "${1:-}" = run ]; then
	prepare >"$share/prepare.log" 2>&1
fi
"$@"
