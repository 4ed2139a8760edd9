# Judges what on-node.sh has looked at: bytes that have passed the interfaces of pods, and those that limits have
# counted and let through. Included by node.sh.

def passed($name; $direction): .limits[] | select(.name == $name)[$direction]
	| [.pass_bytes, .mark_bytes, .slow_bytes] | add // 0;
def moved($pods; $direction): .pods as $all | [$pods[] | $all[.][$direction] // 0] | add;
def both: [["out", "egress"], ["in", "ingress"]][];

# What a new pod may send and receive before it is decided which limits hold it.
def start_bytes: 65536;
def burst_bytes: 65536;
# Frames of ARP and the like are not limited.
def other_bytes: 4096;

# What has passed pods and their limit has not counted, in both directions together.
def uncounted($name; $pods):
	. as $look | [both as [$moved, $counted]
		| [0, ($look | moved($pods; $moved) - passed($name; $counted))] | max] | add;

# From one look to the next: in these directions bytes have moved, the limit has counted them all, and they are no more
# than it allows.
def held($before; $after; $name; $pods; $rate_bit_s; $directions):
	def change(value): ($after | value) - ($before | value);
	[both as [$moved, $counted]
		| select($directions | index($moved))
		| { direction: $moved, bytes: change(moved($pods; $moved)), counted: change(passed($name; $counted)),
			may: (change(.at_s) * $rate_bit_s / 8 * 1.05 + burst_bytes) }
		| .held = (.bytes > 0 and .bytes <= .counted + other_bytes and .bytes <= .may)];
