# What the checks of `scripts/kube.sh test` have in common. Read by the scripts that hold them; their first argument is a
# directory for what they write. KUBECONFIG is that of an administrator.

chart=deploy/helm/tidegate
failed=0

# A condition is waited for so long.
deadline_s=60 look_s=0.1

pass() {
	echo "ok: $1"
}

fail() {
	echo "FAILED: $1"
	failed=1
}

# A command succeeds.
expect() {
	local what=$1 said
	shift
	if said=$("$@" 2>&1); then pass "$what"; else fail "$what: $said"; fi
}

# A command fails, and says this.
refuses() {
	local what=$1 why=$2 said
	shift 2
	if said=$("$@" 2>&1); then
		fail "$what: it does not fail"
	elif [[ $said != *"$why"* ]]; then
		fail "$what: wanted \`$why\`, got: $said"
	else
		pass "$what"
	fi
}

# Two texts are the same.
same() {
	local what=$1 difference
	if difference=$(diff "$2" "$3"); then pass "$what"; else fail "$what: $difference"; fi
}

until_true() {
	local end=$((SECONDS + deadline_s))
	until "$@" >/dev/null 2>&1; do
		if ((SECONDS > end)); then
			echo "waited in vain for: $*"
			return 1
		fi
		sleep "$look_s"
	done
}

# The chart for a release `tidegate` in the namespace `tidegate`; further arguments are helm's.
chart() {
	helm template tidegate "$chart" --namespace tidegate "$@"
}

# The base of kustomize, with the components that are named.
layer() {
	local layer name
	layer=$(mktemp --directory --tmpdir=target/kube)
	{
		echo "resources: [../../../deploy/kustomize/base]"
		for name in "$@"; do
			echo "components: [../../../deploy/kustomize/$name]"
		done
	} >"$layer/kustomization.yaml"
	kubectl kustomize "$layer"
	rm -r "$layer"
}
