# Two commands do everything: `make audit` and `make test`. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
NATIVE := .venv/.native
OUT ?= audit
MINUTES ?= 60
# Two workers, each with whole files: what the tests of a file share is made once. What Python compiles is kept for the
# processes that tests start, and for the next run.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(1) -m pytest -n 2 --dist loadfile
# What the versions of other packages can break most: the command line, data, models, training, numbers, pages, plug-ins.
LOWEST ?= tests/adapters tests/capture tests/cli tests/data tests/defences tests/epsilon tests/guard tests/models tests/pipeline \
	tests/report tests/scenario tests/simulation

PEERS ?= peers and not long

# Flower wants older versions of these three than we are tested with.
NOT_FOR_PEERS := typer|rich|packaging

.PHONY: audit setup test test-core test-slow test-all test-pages chromium test-peers test-flower test-lowest lint format bench bench-peers schema docs first-hour same-numbers fuzz faults setup-locked lock sbom vulnerabilities clean

audit: $(NATIVE)  ## run the default audit on the embedded photographs; report in audit/report.html
	$(BIN)/fedaudit audit --out $(OUT)

setup: $(NATIVE)  ## make .venv and install fedaudit with everything that tests need

$(READY): pyproject.toml catalogue/pyproject.toml lab/pyproject.toml trees/pyproject.toml src/fedaudit/utils/version.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./catalogue -e ./lab -e ./trees
	@touch $(READY)

setup-locked:  ## make .venv from requirements-dev.txt: only files whose SHA-256 stands there (Linux, torch for CPUs)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e ./catalogue -e ./lab -e ./trees
	@touch $(READY)

# The native code, built again when its source has changed; without a compiler everything works, slower.
$(NATIVE): $(READY) src/fedaudit/utils/winograd.cpp src/fedaudit/utils/native.py
	-$(BIN)/fedaudit doctor --build
	@touch $(NATIVE)

test: lint $(NATIVE)  ## lint, types, import rules, and the core of the tests
	$(call PYTEST,$(BIN)/python) -m 'not slow and not long'

test-core: $(NATIVE)  ## the core of the tests without those of our other distributions
	$(call PYTEST,$(BIN)/python) -m 'not slow and not long' --ignore tests/catalogue --ignore tests/lab --ignore tests/trees

test-slow: $(NATIVE)  ## the tests that take long
	$(call PYTEST,$(BIN)/python) -rs -m 'slow and not long'

test-all: lint $(NATIVE) first-hour test-pages  ## everything, what is too long for CI, too: hours
	$(call PYTEST,$(BIN)/python) -rs --hypothesis-profile=thorough
	$(MAKE) test-peers PEERS=peers
	$(MAKE) test-lowest LOWEST=tests

test-pages: $(NATIVE) chromium  ## every kind of page in headless Chromium: accessible, readable on a phone, two sheets to file
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[pages]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/report/test_pages.py

chromium:  ## Debian's Chromium, where we may install it; without it the tests that need it say that they skip
	@command -v chromium > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null \
	&& apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core > /dev/null; } \
	|| echo "no Chromium and no way to install it: the tests of the pages in a browser skip"

test-peers: .venv-peers/.ready  ## the tests against other people's libraries: ByzFL, Flower, NVFlare, breaching, LPIPS, MONAI, Opacus, Ray, jax_privacy
	.venv-peers/bin/python -c "from fedaudit.utils.machine import import_torchvision, own_process; \
	own_process(); import_torchvision(); import breaching, byzfl, flwr.simulation, lpips, nvflare, ray, torchvision"
	OMP_NUM_THREADS=1 .venv-peers/bin/python -m pytest -m '$(PEERS)'

test-flower: .venv-peers/.ready  ## the tests of Flower apps at both ends of the versions that pyproject.toml allows
	for version in 1.41 1.42; do \
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	--target .venv-peers/flwr-$$version "flwr==$$version.*" \
	&& PYTHONPATH=$(CURDIR)/.venv-peers/flwr-$$version OMP_NUM_THREADS=1 .venv-peers/bin/python -m pytest -m peers tests/adapters/test_flower_*.py || exit 1; done

test-lowest: .venv-lowest/.ready  ## the core's rooms that other packages can break, with the lowest versions that pyproject.toml allows
	$(call PYTEST,.venv-lowest/bin/python) -m 'not slow and not long and not peers' $(LOWEST)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(NATIVE)  ## all benchmarks, quickly; page in bench/bench.html
	$(BIN)/fedaudit bench all --quick --out bench

bench-peers: .venv-peers/.ready  ## all benchmarks in full, beside breaching, Flower and ByzFL (data: FEDAUDIT_DATA)
	.venv-peers/bin/fedaudit bench all --vs breaching --vs flower --vs byzfl --out bench

.venv-peers/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-peers
	grep -vE '^($(NOT_FOR_PEERS))==' constraints.txt > .venv-peers/constraints.txt
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-peers/constraints.txt -e '.[bench,test]' -e ./catalogue -e ./lab -e ./trees
	-.venv-peers/bin/fedaudit doctor --build
	@touch .venv-peers/.ready

.venv-lowest/.ready: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-lowest.txt -e '.[test]' -e ./catalogue -e ./lab -e ./trees
	-.venv-lowest/bin/fedaudit doctor --build
	@touch .venv-lowest/.ready

schema: $(READY)  ## write what is made from the code: the reference's pages, and the JSON Schema of results.json
	$(BIN)/python -m tools.docs

docs: schema .venv-docs/.ready  ## write the reference from the code, and build the site: site/index.html; no network
	$(BIN)/python -m tools.docs site build/docs
	cd build/docs && $(CURDIR)/.venv-docs/bin/zensical build --clean --strict
	$(BIN)/python -m tools.docs finish build/docs/site
	rm -rf site && mv build/docs/site site

.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c "import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch .venv-docs/.ready

first-hour:  ## play a newcomer's first hour with what is committed, in an empty environment; fails on any surprise
	$(PYTHON) tools/first_hour.py

same-numbers: $(NATIVE)  ## compare this version's numbers with another commit's, bit for bit: make same-numbers OLD=v0.1
	rm -rf .old && git worktree prune && git worktree add --quiet --detach .old $(OLD)
	$(BIN)/python -m tools.same_numbers .old; code=$$?; git worktree remove --force .old; exit $$code

fuzz: $(NATIVE)  ## odd scenarios, studies, flags and files for an hour; goes on where it was stopped: make fuzz MINUTES=10
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.fuzz --minutes $(MINUTES)

faults: $(NATIVE)  ## kill, fill disks, remove folders, break clocks: is anything lost, doubled or different? (half an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.faults $(FAULTS)

.venv-supply/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-supply
	.venv-supply/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c "import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['supply'])")
	@touch .venv-supply/.ready

lock: .venv-supply/.ready  ## write requirements-dev.txt: what constraints.txt pins, with the SHA-256 of every file
	.venv-supply/bin/python -m tools.supply_chain requirements | CUSTOM_COMPILE_COMMAND="make lock" \
	.venv-supply/bin/pip-compile --quiet --rebuild --generate-hashes --strip-extras --allow-unsafe --no-annotate \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host -c constraints.txt -o requirements-dev.txt -

sbom: $(READY) .venv-supply/.ready  ## write dist/*.cdx.json, the CycloneDX bill of materials of the wheel
	rm -rf dist && $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .
	.venv-supply/bin/cyclonedx-py environment --output-reproducible --sv 1.6 --pyproject pyproject.toml \
	--mc-type library -o dist/environment.json $(BIN)/python
	$(BIN)/python -m tools.supply_chain closure > dist/closure.json
	.venv-supply/bin/python -m tools.supply_chain sbom dist/environment.json dist/closure.json dist/*.whl \
	"$$(ls dist/*.whl | sed 's/-py3.*/.cdx.json/')" && rm dist/environment.json dist/closure.json

vulnerabilities: .venv-supply/.ready  ## known vulnerabilities of what is locked; asks the advisories' service, so it needs the network
	.venv-supply/bin/pip-audit --require-hashes --disable-pip --strict -r requirements-dev.txt

clean:
	rm -rf dist build site .venv-docs .venv-supply .venv .venv-peers .venv-lowest .mypy_cache .ruff_cache .pytest_cache
