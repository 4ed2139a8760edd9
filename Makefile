# Tidegate: what a newcomer types. `make` alone lists the targets.
#
# A fresh Debian 12 or newer, or Ubuntu 24.04 or newer, needs git, make and a Rust toolchain: `make demo` and
# `make test` install what else is missing, and say what and why. They build as the user who calls them, and
# ask for root (through sudo) only for the parts that need it.

CARGO   ?= cargo
PREFIX  ?= /usr/local
OUT     ?= lab-results
EXP     ?=
QUICK   ?=
SECONDS ?= 60
TARGET  ?=
ARCHS   ?= x86_64
PACKAGES ?= target/package

# Where cargo puts what it builds: CARGO_TARGET_DIR, cargo's settings, or target.
target_dir = $(shell CARGO=$(CARGO) scripts/target-dir.sh)

C_SOURCES := bpf/*/*.c bpf/*/*.h crates/sys/native/*.c crates/instruments/bpf/* crates/instruments/native/*.c

.DEFAULT_GOAL := help
.PHONY: help deps build demo test test-fresh test-kill test-upgrade test-vm test-kube test-kube-node lint count bench fuzz lab package test-package install uninstall clean

help: ## List the targets
	@awk -F ':.*## ' '/^[-a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  make lab EXP=\"NAME...\" [QUICK=1] [OUT=DIR]   names: $(target_dir)/release/tidegate-lab list"
	@echo "  make install [PREFIX=/usr/local] [DESTDIR=]"

deps: ## Install what build, lab and lint need, as far as it is missing
	@scripts/deps.sh build lab lint

build: ## Build the release binaries
	@scripts/deps.sh build
	$(CARGO) build --release --locked --bins

demo: ## Show in three minutes what Tidegate does, in throwaway network namespaces
	@scripts/deps.sh build lab
	$(CARGO) build --release --locked --bins
	@scripts/lab.sh demo --out "$(OUT)"

test: ## Run all tests, the privileged ones as root
	@scripts/deps.sh build fleet lab web
	@scripts/test.sh

test-fresh: ## Run `make demo` and `make test` in a fresh root file system, as a newcomer would
	@scripts/fresh.sh run --user "make demo" "make install" "tidegate --version" \
		"sudo make install DESTDIR=/tmp/installed && ! find target -user root | grep ." "make test"

test-kill: ## Kill writers at each of their system calls, and look at what is left (an hour or more)
	@scripts/deps.sh build fleet lab
	@scripts/test-kill.sh

test-upgrade: ## Have binaries of earlier commits put limits on, and go on with them (a build for each commit)
	@scripts/deps.sh build fleet lab
	@scripts/test-upgrade.sh

test-vm: ## Run the privileged tests on Debian's kernels 6.1 to 7.3, and units and packages under systemd, in VMs
	@scripts/deps.sh build lab
	$(CARGO) build --locked --bins
	@scripts/vm.sh all

test-kube: ## Check deploy/ with a real API server, and run the agent as its DaemonSet says (builds Kubernetes once)
	@scripts/deps.sh build
	$(CARGO) build --locked --bin tidegate
	@scripts/kube.sh test

test-kube-node: ## Boot a node with kubelet and containerd, and limit its pods (emulated: half an hour)
	@scripts/deps.sh build
	$(CARGO) build --locked --bin tidegate
	@scripts/kube.sh test node

lint: ## Check format, lints, docs, licences and the rules of layout
	@scripts/deps.sh build lint
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	$(CARGO) check --locked --manifest-path fuzz/Cargo.toml
	clang-format --dry-run -Werror $(C_SOURCES)
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	for features in "" tidegate/containers tidegate/kubernetes; do \
		$(CARGO) clippy --package tidegate --package tidegate-agent --locked --no-default-features \
			--features "$$features" -- -D warnings || exit 1; \
	done
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	@scripts/check-rules.sh

count: ## Count lines of production code, locked packages and the size of the binary
	@scripts/count.sh

bench: ## Measure the algorithms, the timing wheel, and a packet in the eBPF programs (as root)
	@scripts/deps.sh build lab bench
	$(CARGO) bench --package tidegate-core --bench virtual_queue --locked
	$(CARGO) build --release --locked --bins
	@scripts/lab.sh run wheel program-cost $(if $(QUICK),--quick) --out "$(OUT)"

fuzz: ## Run each fuzz target for SECONDS: make fuzz [SECONDS=60] [TARGET=wheel]
	@scripts/deps.sh build
	@scripts/fuzz.sh "$(SECONDS)" $(TARGET)

lab: ## Run experiments: make lab EXP="htb-latency" [QUICK=1]
	@test -n "$(EXP)" || { echo 'say which: make lab EXP="NAME..."'; exit 1; }
	@scripts/deps.sh build lab
	$(CARGO) build --release --locked --bins
	@scripts/lab.sh run $(EXP) $(if $(QUICK),--quick) --out "$(OUT)"

package: ## Make PACKAGES/*.deb, .rpm, .tar.gz and images of a static binary: make package [ARCHS="x86_64 aarch64"]
	@scripts/package.sh "$(PACKAGES)" $(ARCHS)

test-package: ## Install, upgrade, remove and purge the .deb of `make package` in a fresh root file system
	@scripts/test-package.sh "$(PACKAGES)"

install: ## Build and install `tidegate`, its man pages, completions and unit below PREFIX
	@scripts/install.sh install "$(PREFIX)" "$(DESTDIR)"

uninstall: ## Remove what `make install` put below PREFIX
	@scripts/install.sh uninstall "$(PREFIX)" "$(DESTDIR)"

clean: ## Remove what was built
	$(CARGO) clean
