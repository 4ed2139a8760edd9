# Debian's packages and root file systems, from the mirror that this machine's own apt has. Read by other scripts, in
# the directory of the repository.

# Lines of sources.list for suites of Debian.
debian_sources() {
	local mirror suite
	mirror=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(RELEASE)' 'Created-By: Packages' |
		awk '$2 == "Debian" && $3 !~ /-/ { print $1; exit }')
	[ -n "$mirror" ] || return 1
	for suite in "$@"; do
		echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main"
	done
}

# The machine's proxies and time limits, and what it checks of a mirror's dates, as lines of apt.conf.
apt_settings() {
	apt-config dump | grep -E '^Acquire::([a-z]+::(Proxy|Timeout)|Check-)' || true
}

# Makes the archive DIR/SUITE-KEY.tar of a root file system with some packages; KEY is a hash of what is in it. Its
# path is then in `base`, and an archive that is there is taken. Of several suites the first is SUITE. Further arguments
# are mmdebstrap's.
debian_base() {
	local dir=$1 suite=${2%% *} packages=$3 key
	key=$(echo "$2 $packages" | sha256sum | cut -c 1-12)
	base=$dir/$suite-$key.tar
	[ ! -e "$base" ] || return 0
	mkdir -p "$dir"
	# shellcheck disable=SC2086
	debian_sources $2 >"$dir/sources.list" || return 1
	apt_settings >"$dir/apt.conf"
	shift 3
	echo "Making a root file system of Debian $suite ($packages)"
	# What can be made anew need not reach the disk at each step.
	scripts/as-root.sh env --unset APT_CONFIG mmdebstrap --quiet --variant=minbase --include="${packages// /,}" \
		--aptopt="$dir/apt.conf" --dpkgopt=force-unsafe-io "$@" \
		"$suite" "$dir/partial.tar" "$dir/sources.list" >"$dir/mmdebstrap.log" 2>&1 || return 1
	mv "$dir/partial.tar" "$base"
}
