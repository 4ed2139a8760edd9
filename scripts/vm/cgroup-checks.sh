#!/usr/bin/env bash
# Inside a machine with systemd, and with the package installed, whose host has cgroup v1: beside v2 (`hybrid`), or
# alone (`v1`).
#
#   doctor    `tidegate doctor` says which
#   unit      hybrid: a service is limited by its name, and restarts
#             v1: services have no cgroup of v2. The limit waits, and says so
#   device    a device is limited, and stays so when the agent restarts
set -uo pipefail

here=${BASH_SOURCE%/*}
source "$here/checks.sh"
source "$here/traffic.sh"

checks=(doctor unit device)
prefix=cgroups_$word
rules=/etc/tidegate/test.toml

setup() {
	:
}

prepare() {
	grep cgroup /proc/mounts
	be_patient
	sender_up
	dpkg --install /root/tidegate-1.deb
}

finds() {
	tidegate doctor >/run/doctor
	cat /run/doctor
	grep -q "$1" /run/doctor
}

check_doctor() {
	if [ "$word" = hybrid ]; then
		finds 'beside version 1 (hybrid)'
	else
		finds 'only version 1 is' && finds 'systemd.unified_cgroup_hierarchy=1'
	fi
}

check_unit() {
	local code=0 i
	rule web 'unit = "web.service"' >"$rules"
	systemctl start web
	if [ "$word" = hybrid ]; then
		until_true in_force web && flows && mark web || code=1
		for i in 1 2 3; do
			((code)) || systemctl restart web && flows || code=1
		done
		((code)) || until_true in_force web && held 3 && in_time web 3 || code=1
	else
		until_true says web waiting 'version 2' && active || code=1
	fi
	systemctl stop web
	rm "$rules"
	return "$code"
}

check_device() {
	local code=0
	rule device 'dev = "tg0"' >"$rules"
	until_true in_force device && mark && systemctl start web && flows && systemctl restart tidegate-agent &&
		in_force device && flows && until_true in_force device && held || code=1
	systemctl stop web
	rm "$rules"
	return "$code"
}

if [ "${1:-}" = run ]; then
	prepare >"$share/prepare.log" 2>&1
fi
"$@"
