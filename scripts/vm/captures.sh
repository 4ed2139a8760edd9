# Labelled captures of real kernels: what TCP meets is known, and tcpdump sees it on both sides. Read by
# scripts/vm.sh.
#
#   scripts/vm.sh captures           all
#   scripts/vm.sh captures codel pie     those whose names begin so
#
# Three network namespaces in one machine: a sender, a router, a receiver. The router polices, queues or loses;
# acknowledgements come back late by the round trip. The captures are in target/vm/captures, and
# `cargo run --release -p tidegate-capture --example labelled -- files target/vm/captures/*.pcap` judges them.

# The kernel of these machines.
captures_kernel=6.12
limit_captures=60m
capture_seconds=12
# Kind, rate in kbit/s, bytes of the bucket or queue, round trip in ms, congestion control, flows.
captures=(
	policer-2000-16000-20-cubic-1 policer-2000-64000-50-reno-1 policer-5000-32000-50-bbr-1
	policer-5000-100000-20-cubic-3 policer-10000-32000-20-reno-2 policer-10000-250000-50-cubic-1
	policer-1000-16000-100-bbr-2 policer-10000-64000-10-bbr-1
	fifo-2000-16000-20-cubic-1 fifo-5000-64000-50-reno-1 fifo-5000-32000-20-cubic-3 fifo-10000-64000-20-bbr-1
	shaper-2000-16000-20-cubic-1 shaper-5000-32000-50-reno-2 shaper-10000-64000-20-cubic-1
	codel-2000-64000-20-cubic-1 codel-5000-250000-50-reno-2 codel-10000-250000-20-bbr-1
	red-2000-64000-20-cubic-1 red-5000-100000-50-reno-2 red-10000-100000-20-bbr-1
	pie-2000-64000-20-cubic-1 pie-5000-250000-50-reno-2 pie-10000-250000-20-bbr-1
	chance1-5000-250000-20-cubic-1 chance1-10000-250000-50-bbr-2
	chance2-2000-100000-50-reno-1 chance2-5000-250000-20-cubic-2
)

# On the host: boots the machine, which writes the captures.
make_captures() {
	# Packets take turns with one processor; two would wait for each other.
	local cpus=1 kernel=${kernels[-1]} out=$vm/${kernels[-1]}/out
	rm -rf "$out" "$vm/captures"
	mkdir "$out"
	echo "Captures on $(describe "$kernel")"
	scripts/bounded.sh "$limit_captures" "$self" boot "$kernel" "$self" captures_guest "$kernel" "$@" \
		>"$vm/boot-captures.log" 2>&1 </dev/null || true
	if ! compgen -G "$out/*.pcap" >/dev/null; then
		echo "  there is none: target/vm/$kernel/out/log and target/vm/boot-captures.log may say why"
		return 1
	fi
	mkdir "$vm/captures"
	mv "$out"/*.pcap "$vm/captures/"
	echo "  $(find "$vm/captures" -name '*.pcap' | wc -l) in target/vm/captures"
}

# Inside the machine: the namespaces and the links between them.
make_road() {
	local name
	for name in sender router receiver; do
		ip netns add "$name"
		ip -n "$name" link set lo up
	done
	ip link add s0 netns sender type veth peer name r0 netns router
	ip link add r1 netns router type veth peer name d0 netns receiver
	ip -n sender address add 10.71.1.1/24 dev s0
	ip -n router address add 10.71.1.2/24 dev r0
	ip -n router address add 10.71.2.1/24 dev r1
	ip -n receiver address add 10.71.2.2/24 dev d0
	for name in "sender s0" "router r0" "router r1" "receiver d0"; do
		# A packet of the capture is one of the path: hosts send no larger ones.
		# shellcheck disable=SC2086
		set -- $name
		ip -n "$1" link set "$2" gso_max_segs 1
		ip -n "$1" link set "$2" up
	done
	ip -n sender route add default via 10.71.1.2
	ip -n receiver route add default via 10.71.2.1
	ip netns exec router sysctl --quiet --write net.ipv4.ip_forward=1
}

# Inside the machine: what the router does to packets for the receiver.
make_gate() {
	local kind=$1 rate=$2 bytes=$3 packets
	local out=(tc -n router qdisc add dev r1)
	packets=$((bytes / 1514 + 1))
	tc -n router qdisc del dev r1 root 2>/dev/null || true
	tc -n router qdisc del dev r0 ingress 2>/dev/null || true
	case $kind in
	policer)
		tc -n router qdisc add dev r0 ingress
		tc -n router filter add dev r0 ingress protocol ip matchall \
			action police rate "${rate}kbit" burst "$bytes" conform-exceed drop
		;;
	fifo) "${out[@]}" root tbf rate "${rate}kbit" burst 2000 limit "$bytes" ;;
	shaper) "${out[@]}" root tbf rate "${rate}kbit" burst "$bytes" limit "$bytes" ;;
	chance?) "${out[@]}" root netem loss "${kind#chance}%" rate "${rate}kbit" limit "$packets" ;;
	codel | red | pie)
		"${out[@]}" root handle 1: tbf rate "${rate}kbit" burst 2000 limit $((4 * bytes))
		case $kind in
		red)
			tc -n router qdisc add dev r1 parent 1:1 red limit "$bytes" min $((bytes / 4)) \
				max $((bytes * 3 / 4)) avpkt 1000 burst $((bytes / 4000 + 10)) bandwidth "${rate}kbit"
			;;
		*) tc -n router qdisc add dev r1 parent 1:1 "$kind" limit "$packets" ;;
		esac
		;;
	esac
}

capture() {
	local name=$1 kind rate bytes rtt cc flows taps=() tap
	IFS=- read -r kind rate bytes rtt cc flows <<<"$name"
	make_gate "$kind" "$rate" "$bytes"
	tc -n receiver qdisc replace dev d0 root netem delay "${rtt}ms" limit 100000
	ip netns exec sender tcpdump -i s0 -s 128 -B 8192 -U -w "$2/$name-sender.pcap" tcp &
	taps+=($!)
	ip netns exec receiver tcpdump -i d0 -s 128 -B 8192 -U -w "$2/$name-receiver.pcap" tcp &
	taps+=($!)
	for tap in sender receiver; do
		# tcpdump writes the header when it listens.
		until [ -s "$2/$name-$tap.pcap" ]; do sleep 0.1; done
	done
	ip netns exec sender iperf3 --client 10.71.2.2 --congestion "$cc" --parallel "$flows" --time "$capture_seconds" ||
		echo "iperf3 failed: $name"
	kill "${taps[@]}"
	wait "${taps[@]}" || true
}

captures_guest() {
	local out=$vm/$1/out name start server
	shift
	(($# > 0)) || set -- ""
	{
		guest_ready
		modprobe --all veth sch_netem sch_tbf sch_codel sch_red sch_pie sch_ingress act_police cls_matchall tcp_bbr
		make_road
		ip netns exec receiver iperf3 --server &
		server=$!
		until ip netns exec receiver ss --listening --tcp --numeric | grep -q :5201; do sleep 0.1; done
		for name in "${captures[@]}"; do
			for start in "$@"; do
				[[ $name != "$start"* ]] || capture "$name" "$out"
			done
		done
		kill "$server"
	} >"$out/log" 2>&1 </dev/null
}
