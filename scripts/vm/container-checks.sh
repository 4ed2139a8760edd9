#!/usr/bin/env bash
# Inside a machine with systemd and podman, and with the package installed: limits on containers, of root and of a
# user.
#
#   name       the container `web` is limited by its name, and restarts twenty times
#   label      a container brings its rate in a label, and restarts
#   user_name  a user's container is limited by its name, and restarts twenty times
#   user_label a user's container brings its rate
#   never      a container that does not come waits, and keeps nobody away
#   away       the engine's socket goes away and comes back; the limit holds
#   wrong      one wrong limit of five: the other four are in force
#   twice      of two limits on one container the first has it, and the other says so
#
# A container runs on this machine's /usr and in its network, and sends to the peer without an end.
set -uo pipefail

here=${BASH_SOURCE%/*}
source "$here/checks.sh"
source "$here/traffic.sh"

checks=(name label user_name user_label never away wrong twice)
prefix=containers
user=anna
rules=/etc/tidegate/test.toml
image=/var/lib/checks-image

setup() {
	:
}

prepare() {
	local dir
	useradd --create-home "$user"
	mkdir -p "$image"/{usr,tmp,etc,run,proc,sys,dev}
	for dir in bin sbin lib lib64; do
		[ ! -e "/usr/$dir" ] || ln -s "usr/$dir" "$image/$dir"
	done
	chmod -R a+rX "$image"
	net_up
	systemd-run --unit sink ip netns exec peer socat -u TCP-LISTEN:9,reuseaddr,fork OPEN:/dev/null
	dpkg --install /root/tidegate-1.deb
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

# A container that sends, by the podman that the words after the name and the options call.
starts() {
	local who=$1 name=$2
	shift 2
	"$who" podman run --detach --name "$name" --network host --volume /usr:/usr:ro "$@" --rootfs "$image" \
		socat -u OPEN:/dev/zero TCP:10.98.0.2:9
}

as_root() {
	"$@"
}

gone() {
	"$1" podman rm --force --time 0 "$2"
	rm -f "$rules"
}

# The container starts, is limited by the limit NAME, and is limited again each of the times that it restarts.
follows() {
	local who=$1 container=$2 name=$3 restarts=$4 i
	shift 4
	starts "$who" "$container" "$@" && until_true in_force "$name" && flows && mark "$name" || return 1
	for ((i = 0; i < restarts; i++)); do
		"$who" podman restart --time 0 "$container" && flows || return 1
	done
	until_true in_force "$name" && held "$restarts" && in_time "$name" "$restarts"
}

check_name() {
	local code=0
	rule web 'container = "web"' >"$rules"
	until_true says web waiting 'there is no container `web`' && follows as_root web web 20 || code=1
	gone as_root web
	((code == 0)) && until_true no_limits
}

check_label() {
	local code=0
	echo "labels = true" >"$rules"
	follows as_root rated container-rated 3 --label "tidegate.egress=${rate_bit_s}bit" || code=1
	gone as_root rated
	((code == 0)) && until_true no_limits
}

check_user_name() {
	local code=0
	rule web 'container = "web"' >"$rules"
	follows as_user web web 20 || code=1
	gone as_user web
	return "$code"
}

check_user_label() {
	local code=0
	echo "labels = true" >"$rules"
	follows as_user rated container-rated 3 --label "tidegate.egress=${rate_bit_s}bit" || code=1
	gone as_user rated
	return "$code"
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
	starts as_root web && until_true in_force web && says never waiting 'there is no container `never`' &&
		tidegate status --check || code=1
	gone as_root web
	return "$code"
}

# What the agent says of podman's engine begins so.
engine() {
	tidegate status --json | jq -e --arg word "$1" \
		'.agent.engines["/run/podman/podman.sock"] | startswith($word)' >/dev/null
}

check_away() {
	local code=0
	rule web 'container = "web"' >"$rules"
	starts as_root web && until_true in_force web && mark && systemctl stop podman.socket podman.service &&
		until_true engine away && in_force web && flows && held && systemctl start podman.socket &&
		until_true engine running && podman restart --time 0 web && flows && until_true in_force web && held 1 || code=1
	systemctl start podman.socket
	gone as_root web
	return "$code"
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
	starts as_root web || code=1
	for n in web sink users bus; do
		until_true in_force "$n" || code=1
	done
	tidegate status --json | jq -e '.agent.errors[0] | contains("limit `wrong`: egress")' || code=1
	tidegate status --check
	[ $? = 3 ] || code=1
	gone as_root web
	return "$code"
}

check_twice() {
	local code=0
	{
		rule web 'container = "web"'
		rule again 'container = { labels = "app=web" }'
	} >"$rules"
	starts as_root web --label app=web && until_true in_force web &&
		until_true says again refused 'limits `web` and `again` both match cgroup' && in_force web || code=1
	gone as_root web
	return "$code"
}

if [ "${1:-}" = run ]; then
	prepare >/run/prepare.log 2>&1
fi
"$@"
