# Debian's kernels, and machines that boot them. Read by scripts/vm.sh, whose variables these functions use.

# The suites that hold the kernels.
suites=(bookworm bookworm-backports trixie-backports)
# How a machine is emulated. QEMU's thread for each processor may run an instruction that another one has just
# patched: kernels use an int3 for this, which nobody claims by then, and panic ("Oops: int3", seen on 7.3). So one
# thread runs all processors.
emulated=(--disable-kvm --qemu-opts="-accel tcg,thread=single")
# The same, and the machine's clock counts its instructions, 2 ns each (shift=1): that is about what a quiet host
# needs. A busy host makes a run longer, but no machine slower in its own time, and processors take turns within a
# tick instead of up to 0.1 s. While all are idle the clock goes on with the host's (sleep=on).
emulated_by_count=(--disable-kvm --qemu-opts="-accel tcg,thread=single -icount shift=1,sleep=on")
# These kernels wait for their second processor in a loop in which such a clock hardly goes on: 6.1 was not up
# after nine minutes.
not_by_count=(6.1)
# A kernel that is not up on KVM by then hangs. Where KVM works it takes some seconds.
limit_probe=30

# apt with a configuration, lists and a cache of its own.
private_apt() {
	[ -z "${APT_CONFIG:-}" ] || return 0
	local apt=$vm/apt
	mkdir -p "$apt/lists/partial" "$apt/archives/partial"
	debian_sources "${suites[@]}" >"$apt/sources.list" || return 1
	# Nothing is installed here, so nothing counts as installed.
	: >"$apt/status"
	{
		apt_settings
		cat <<-END
			Dir::State "$apt";
			Dir::State::lists "$apt/lists";
			Dir::State::status "$apt/status";
			Dir::Cache "$apt";
			Dir::Etc::sourcelist "$apt/sources.list";
			Dir::Etc::sourceparts "/dev/null";
			Dir::Etc::parts "/dev/null";
			APT::Sandbox::User "root";
			Acquire::Languages "none";
		END
	} >"$apt/apt.conf"
	APT_CONFIG=$apt/apt.conf apt-get --quiet=2 update || return 1
	export APT_CONFIG=$apt/apt.conf
}

# The newest kernel of a series, unpacked in target/vm/SERIES. Since 7.x the image is a metapackage, and
# its files are in packages of the same version.
fetch_kernel() {
	local series=$1 dir=$vm/$1 version packages part
	[ ! -e "$dir/ready" ] || return 0
	private_apt || return 1
	version=$(apt-cache pkgnames "linux-image-$series." |
		sed -n -E "s/^linux-image-($series\.[0-9][-+.0-9a-z]*-amd64)\$/\1/p" |
		grep -v -E -- '-(rt|cloud)-' | sort --version-sort | tail -n 1)
	[ -n "$version" ] || return 1
	packages=("linux-image-$version")
	for part in binary modules base; do
		part=$(apt-cache pkgnames "linux-$part-$version" | grep -F -x "linux-$part-$version") && packages+=("$part")
	done
	echo "Fetching ${packages[*]}"
	rm -rf "$dir"
	mkdir -p "$dir"
	(cd "$dir" && apt-get --quiet=2 download "${packages[@]}") || return 1
	for part in "$dir"/*.deb; do
		dpkg-deb --fsys-tarfile "$part" | tar --extract --directory "$dir" --keep-directory-symlink
	done
	rm "$dir"/*.deb
	[ -e "$dir/lib" ] || ln -s usr/lib "$dir/lib"
	if [ ! -e "$dir/boot/vmlinuz-$version" ]; then
		mkdir -p "$dir/boot"
		ln -s "../usr/lib/modules/$version/vmlinuz" "$dir/boot/vmlinuz-$version"
	fi
	depmod --basedir "$dir" "$version"
	touch "$dir/ready"
}

# Its version, for people.
describe() {
	basename "$vm/$1"/boot/vmlinuz-* | cut -d - -f 2-
}

# How a kernel is booted on this root file system.
vng_command() {
	local kernel=$1
	vng=(vng --run "$(ls "$vm/$kernel"/boot/vmlinuz-*)" --force-9p --verbose --user root --cpus "$cpus" --memory "$memory")
}

# Whether a kernel boots on KVM here. Tried once for each kernel and host, until one does not: where one hangs, so
# do the others.
runs_on_kvm() {
	local kernel=$1 host answer=no vng
	local file=$vm/$kernel/kvm probe=$vm/$kernel/probe refused=$vm/kvm-refused
	[ -r /dev/kvm ] && [ -w /dev/kvm ] || return 1
	host=$(uname -nr)
	[ "$(cat "$refused" 2>/dev/null)" != "$host" ] || return 1
	if [ "$(sed -n 1p "$file" 2>/dev/null)" != "$host" ]; then
		vng_command "$kernel"
		rm -rf "$probe"
		mkdir "$probe"
		scripts/bounded.sh "$limit_probe" "${vng[@]}" --rwdir="$probe" -- touch "$probe/up" \
			>"$vm/probe-$kernel.log" 2>&1 </dev/null || true
		[ ! -e "$probe/up" ] || answer=yes
		if [ "$answer" = no ]; then
			echo "Kernel $kernel does not come up on this machine's KVM within $limit_probe s: machines are emulated" >&2
			echo "$host" >"$refused"
		fi
		printf '%s\n' "$host" "$answer" >"$file"
	fi
	[ "$(sed -n 2p "$file")" = yes ]
}

# Boots a kernel and runs a command in it as root; what the guest writes below target/vm/KERNEL/out stays.
boot() {
	local kernel=$1 vng
	shift
	vng_command "$kernel"
	if ! runs_on_kvm "$kernel"; then
		if [[ " ${not_by_count[*]} " == *" $kernel "* ]]; then
			vng+=("${emulated[@]}")
		else
			vng+=("${emulated_by_count[@]}")
		fi
	fi
	mkdir -p "$vm/$kernel/out"
	"${vng[@]}" --cwd "$PWD" --rwdir="$vm/$kernel/out" "$@"
}
