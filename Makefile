# Tidegate: what a newcomer types. `make` alone lists the targets.
#
# A fresh Debian 12 or newer, or Ubuntu 22.04 or newer, needs a Rust toolchain and nothing else: `make
# demo` and `make test` install what is missing, and say what and why. They build as the user who calls
# them, and ask for root (through sudo) only for the parts that cannot do without.

CARGO   ?= cargo
PREFIX  ?= /usr/local
OUT     ?= lab-results
EXP     ?=
QUICK   ?=
SECONDS ?= 60
TARGET  ?=

C_SOURCES := bpf/*.c bpf/*.h crates/sys/native/*.c

.DEFAULT_GOAL := help
.PHONY: help deps build demo test test-vm lint bench fuzz lab install clean

help: ## List the targets
	@awk -F ':.*## ' '/^[-a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  make lab EXP=\"NAME...\" [QUICK=1] [OUT=DIR]   names: target/release/tidegate-lab list"
	@echo "  make install [PREFIX=/usr/local] [DESTDIR=]"

deps: ## Install what build, lab and lint need, as far as it is missing
	@scripts/deps.sh build lab lint

build: ## Build the release binaries into target/release
	@scripts/deps.sh build
	$(CARGO) build --release --locked --bins

demo: ## Show in three minutes what Tidegate does, in throwaway network namespaces
	@scripts/deps.sh build lab
	$(CARGO) build --release --locked --bins
	@scripts/lab.sh demo --out "$(OUT)"

test: ## Run all tests, the privileged ones as root
	@scripts/deps.sh build fleet lab
	@scripts/test.sh

test-vm: ## Run the privileged tests on Debian's kernels 6.1 to 7.3, and the unit under systemd, in VMs
	@scripts/deps.sh build lab
	$(CARGO) build --locked --bins
	@scripts/vm.sh all

lint: ## Check format, lints, docs, licences and the rules of the house
	@scripts/deps.sh build lint
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	clang-format --dry-run -Werror $(C_SOURCES)
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	@scripts/house.sh

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

install: build ## Install `tidegate`, its man pages, completions and unit below PREFIX
	install -D -m 755 target/release/tidegate "$(DESTDIR)$(PREFIX)/bin/tidegate"
	install -d "$(DESTDIR)$(PREFIX)/share/man/man1" "$(DESTDIR)$(PREFIX)/share/bash-completion/completions"
	install -d "$(DESTDIR)$(PREFIX)/lib/systemd/system"
	sed 's|/usr/local/bin|$(PREFIX)/bin|' packaging/systemd/tidegate-daemon.service \
		> "$(DESTDIR)$(PREFIX)/lib/systemd/system/tidegate-daemon.service"
	target/release/tidegate man "$(DESTDIR)$(PREFIX)/share/man/man1"
	target/release/tidegate completions bash > "$(DESTDIR)$(PREFIX)/share/bash-completion/completions/tidegate"

clean: ## Remove what was built
	$(CARGO) clean
