# Everything happens in a virtualenv, .venv, which scripts/bootstrap makes when it is needed.

PYTHON ?= python3
BIN := .venv/bin
SETUP := @$(PYTHON) scripts/bootstrap
# Python without the ending .py, which tools would overlook.
SCRIPTS := scripts/bootstrap scripts/debian_root scripts/document_types scripts/image \
	scripts/install scripts/lock scripts/manpages scripts/npm_package scripts/recordings scripts/release
# What the sandbox is made of, and the Python that evaluators find in it.
SANDBOX := bwrap,libseccomp.so.2,/usr/bin/python3
# Under what the service is tested: a systemd that boots, and what looks into it.
MACHINE := systemd-analyze,nsenter,ip,pgrep

# What makes and boots machines of other Debians.
MACHINES := qemu-system-x86_64,mmdebstrap,/usr/sbin/mke2fs,bwrap,fakeroot,newuidmap

# Where to install, and a Python that every user can read.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
DESTDIR ?=
INSTALL_PYTHON ?= /usr/bin/python3
INSTALL := $(INSTALL_PYTHON) scripts/install --destdir "$(DESTDIR)" --prefix "$(PREFIX)" \
	--sysconfdir "$(SYSCONFDIR)"

.PHONY: help setup demo test fuzz test-machine test-bare check bench soak simulate man docs install uninstall deb \
	image wheel npm release lock audit vendor gallery clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## judge example solutions and show the events; keep the page open with KEEP=1
	$(SETUP) --needs git --wants g++,$(SANDBOX)
	$(BIN)/python examples/demo.py $(if $(KEEP),--keep)

test: ## run the tests; a part of them with TESTS=tests.core.test_event_log
	$(SETUP) --extras test $$($(PYTHON) tests/programs.py $(TESTS))
	@$(PYTHON) tests/programs.py --skipped $(TESTS)
	$(BIN)/python tests/run.py $(TESTS)

fuzz: ## try what strangers may send, for FUZZ_SECONDS=600; FUZZ_SEED=, FUZZ_ROUNDS=, TARGETS=
	$(SETUP) --extras test $$($(PYTHON) tests/programs.py tests.fuzz)
	$(BIN)/python -m tests.fuzz $(TARGETS)

test-machine: ## test the Debian package on Debian 12 and 13, with their kernels, in QEMU
	$(SETUP) --extras test --needs git --wants $(MACHINES)
	$(BIN)/python -m tests.machine $(if $(PREPARE),--prepare) $(if $(ONLY),--only $(ONLY)) $(SUITES)

test-bare: ## run demo and tests on a bare Debian, as root in /root; SUITE=bookworm
	$(SETUP) --extras test --needs git,mmdebstrap,bwrap
	$(BIN)/python -m tests.machine.bare $(SUITE)

# One after the other, so that nothing is installed while programs of the virtualenv run.
setup: ## install what check, docs, test and test-machine use
	$(SETUP) --extras check,docs,test --needs git --wants $(MACHINES),lintian
	$(SETUP) $$($(PYTHON) tests/programs.py --all)

check: ## check style, types, and that imports point down
	$(SETUP) --extras check,test
	$(BIN)/ruff check . $(SCRIPTS)
	$(BIN)/ruff format --check . $(SCRIPTS)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: ## measure it, against baselines taken in the same run; some minutes
	$(SETUP) --extras bench,test --needs git,/usr/bin/python3 \
		--wants curl,/usr/sbin/nginx,/usr/bin/go,$(SANDBOX),$(MACHINE)
	$(BIN)/python -m benchmarks

soak: ## let 200 evaluators print 2 GB to all kinds of readers; a few minutes
	$(SETUP) --extras test --needs git,$(SANDBOX)
	$(BIN)/python -m benchmarks.soak

simulate: ## let 10,000 people submit in five simulated minutes; WRITE=1 renews docs/scale.md
	$(SETUP) --extras test
	$(BIN)/python -m benchmarks.simulate $(if $(WRITE),--write)

man: ## write a manual page for each command into build/man
	$(SETUP) --extras man
	$(BIN)/python scripts/manpages build/man

docs: ## build the documentation site into build/docs; fails for a broken link; REPOSITORY_URL=
	$(SETUP) --extras docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

install: man ## install it with its units; PREFIX=/usr/local, SYSCONFDIR=/etc, DESTDIR=
	$(SETUP) --needs git,$(INSTALL_PYTHON),$(SANDBOX)
	$(INSTALL) --pip $(BIN)/python --man build/man

uninstall: ## remove what was installed, but for configuration and state
	$(INSTALL) --remove

# The time of the newest files in packages: the same commit gives the same packages.
deb image man npm wheel: export SOURCE_DATE_EPOCH ?= $(or \
	$(shell git log -1 --format=%ct 2>/dev/null),$(shell date +%s))

deb: ## build a Debian package into build/deb
	$(SETUP) --needs dh,dh_apparmor,git,$(SANDBOX)
	debian/rules clean binary
	debian/rules clean

image: ## build an OCI image into build/image, for podman and docker; without root
	$(SETUP) --needs git,mmdebstrap,newuidmap,/usr/bin/python3
	scripts/image build/image

wheel: ## build the wheels of the daemon and of its client library into build/wheel
	$(SETUP) --extras build
	rm -rf build/wheel build/lib tawebeval_client/build  # an earlier build may have other modules
	umask 022 && $(BIN)/pip --disable-pip-version-check wheel --quiet --no-deps --no-index \
		--no-build-isolation --wheel-dir build/wheel ./tawebeval_client .

npm: ## build a package of npm of the JavaScript client into build/npm
	$(SETUP)
	$(BIN)/python scripts/npm_package build/npm

release: ## check, test, build what is published into dist/; SKIP="check test" leaves these out
	$(foreach target,$(filter-out $(SKIP),check test),$(MAKE) $(target) &&) true
	$(SETUP) --extras build,release --needs git --wants dh,dh_apparmor,mmdebstrap,newuidmap
	$(BIN)/python scripts/release

lock: ## renew versions and hashes of Python packages; those of new ones alone: KEEP=--keep
	$(SETUP) --extras lock
	$(BIN)/python scripts/lock $(KEEP)

audit: ## look for known vulnerabilities in the packages of requirements/*.txt
	$(SETUP) --extras audit
	@mkdir -p build && rm -f build/audit
	@$(BIN)/pip-audit --strict --disable-pip --output build/audit \
		$(addprefix --requirement ,$(wildcard requirements/*.txt)) || \
	if [ -s build/audit ]; then cat build/audit; exit 1; else \
		echo "[audit] nothing was audited: PyPI's advisories cannot be read (error above)" >&2; \
		exit 2; \
	fi

vendor: ## bundle the page's libraries from npm, as scripts/vendor/package-lock.json pins them
	$(SETUP) --needs /usr/bin/node,npm
	rm -rf build/vendor && mkdir -p build && cp -r scripts/vendor build/vendor
	cd build/vendor && npm ci --ignore-scripts --no-audit --no-fund
	cd build/vendor && node build.js $(CURDIR)/tawebeval/web/static

gallery: ## take the pictures of docs/gallery.md in a browser
	$(SETUP) --extras test $$($(PYTHON) tests/programs.py tests.integration.test_page)
	$(BIN)/python -m tests.integration.gallery

clean: ## remove all that was made here, the virtualenv too
	rm -rf .venv build dist *.egg-info tawebeval_client/build tawebeval_client/*.egg-info _trial_temp* .coverage* .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	find . -name dropin.cache -exec rm -f {} +
