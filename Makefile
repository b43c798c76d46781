# Everything runs in .venv at the root; the first call sets it up.
PYTHON ?= python3
BIN := .venv/bin
# One thread a process: the tests run in parallel, and threads of their own would fight. Bytecode is
# kept, whatever the shell says: hundreds of processes would each compile the library anew. Memory is
# kept, too, up to 512 MiB a process: to give back each large tensor's to the system and have the next
# one's filled with zeros is a third of the time of tests that have such tensors.
SETTINGS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 \
	MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=536870912
# Tests of one file run beside each other, in one worker, which shares what their fixtures made.
PYTEST := $(SETTINGS) $(BIN)/python -m pytest -q -rs -n auto --dist worksteal

.PHONY: compare check test test-all test-engines nightly lint bench performance readme docs oracles facts kernels explorer test-floors test-newest release-check clean

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[hf,dev]"
	touch $@

# What only some need: Keras with its jax backend beside the torch one, Triton, which torch for the
# CPU comes without, and statsmodels, which computes published numbers a second time.
.venv/.installed-all: .venv/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[keras]" jax statsmodels \
		"triton==3.9.0; sys_platform == 'linux'"
	touch $@

compare: .venv/.installed
	$(BIN)/posenc compare

# The contract and the own tests of one encoding: make check ENCODING=alibi
check: .venv/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/encodings --encoding "$(ENCODING)"

test: .venv/.installed
	$(PYTEST) -m "not slow and not prose and not nightly"

# Everything that is not left to `make nightly`; with ONLY='-m "slow and not nightly"'
# what `make test` leaves out.
ONLY ?= -m "not nightly"
test-all: .venv/.installed-all
	$(BIN)/pyright -p tests/keras
	$(PYTEST) $(ONLY)

# What takes an environment of its own: the Keras layers on TensorFlow, 2 GB.
.venv-tensorflow/.installed: pyproject.toml constraints.txt
	test -x .venv-tensorflow/bin/python || $(PYTHON) -m venv .venv-tensorflow
	.venv-tensorflow/bin/python -m pip install -q -c constraints.txt "torch==2.13.0"
	.venv-tensorflow/bin/python -m pip install -q -c constraints.txt -e ".[keras]" \
		tensorflow-cpu pytest beartype hypothesis mpmath
	touch $@

# What takes hours: TensorFlow, the engines, other releases, fuzzers and kills for longer, the
# tutorials in whole.
nightly: .venv-tensorflow/.installed .venv/.installed-all test-engines test-floors test-newest
	OMP_NUM_THREADS=1 .venv-tensorflow/bin/python -m pytest -q -rs tests/keras -k tensorflow
	$(PYTEST) -m nightly
	$(BIN)/python -m tests.doctor.oracles full
	$(BIN)/python -m tests.fuzz.attention 10000
	$(BIN)/python -m tests.fuzz.commands 5000
	$(BIN)/python -m tests.fuzz.kills 50
	$(BIN)/python -m tests.fuzz.kills_extend 28
	$(BIN)/python -m tests.fuzz.kills_fix

# The engines of posenc compare: Ray, submitit, a server of S3, TensorBoard, in an environment that
# borrows the rest. Amazon's client wants an older python-dateutil than matplotlib has.
.venv-engines/.installed: .venv/.installed
	test -x .venv-engines/bin/python || $(PYTHON) -m venv .venv-engines
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$(.venv-engines/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/borrowed.pth"
	grep -v python-dateutil constraints.txt > .venv-engines/constraints.txt
	.venv-engines/bin/python -m pip install -q -c .venv-engines/constraints.txt ray submitit s3fs \
		"moto[server]" tensorboard
	touch $@

test-engines: .venv-engines/.installed
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 .venv-engines/bin/python -m pytest -q -rs \
		tests/compare/engines tests/compare/test_progress.py

# Without Keras, pyright would take `import keras` for posenc/keras: make test-all checks its types.
lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST) -m "prose and not slow and not nightly"

bench: .venv/.installed
	$(BIN)/posenc bench

# Measures for half an hour, with one thread and two, and writes docs/performance.md from it.
performance: .venv/.installed
	$(BIN)/posenc bench --all --threads 1,2 --out benchmarks/results/performance.json
	$(BIN)/python docs/scripts/update_performance.py

# A broken config and its mended copy in the real runtimes, each in an environment of its own under
# .venv-oracles; one that cannot be installed is left out, and said so.
oracles: .venv/.installed
	$(BIN)/python -m tests.doctor.oracles

# What releases of transformers have and compute, asked of an interpreter of each:
# make facts PYTHONS="/of/5.2/bin/python /of/5.24/bin/python". A person reads the diff.
facts: .venv/.installed
	$(BIN)/python -m tests.doctor.oracles.facts $(PYTHONS)

# The page of `posenc explore`, from explorer/; only this needs node.
explorer: .venv/.installed
	$(BIN)/python explorer/data.py
	cd explorer && npm ci --no-audit --no-fund && node build.mjs
	sed -n '/^<!-- Bundled/,/^ -->/p' posenc/explore/explore.html | sed '1s/^<!-- //;$$d' > \
		posenc/explore/explore.licenses.txt

# The rotation's Triton kernel for GPUs of NVIDIA and AMD, compiled here, with registers and spills.
kernels: .venv/.installed-all
	$(BIN)/python -W ignore -m tests.encodings.queries_keys.rotation_kernel

readme: .venv/.installed
	$(BIN)/python docs/scripts/update_readme.py
	$(BIN)/python docs/scripts/update_leaderboard.py
	$(BIN)/python docs/scripts/update_numbers.py
	$(BIN)/python docs/scripts/update_findings.py
	$(BIN)/python docs/scripts/update_figures.py
	$(BIN)/python -m experiments.claims
	$(BIN)/python docs/scripts/update_doctor.py
	$(BIN)/python docs/scripts/update_explorer_figure.py

# The site in build/docs, from docs/ and docstrings; warnings and dead links are errors.
.venv/.installed-docs: .venv/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	touch $@

docs: .venv/.installed-docs
	$(BIN)/python docs/build_site.py

# Other releases, each in an environment of its own, 5 to 8 GB: the oldest that pyproject.toml admits,
# some in the middle, and whatever the index has today. Without the emulators, which speak of one
# version of transformers. Warnings of other releases are no failures.
.venv-floors/.installed: pyproject.toml constraints-floors.txt
	test -x .venv-floors/bin/python || $(PYTHON) -m venv .venv-floors
	.venv-floors/bin/python -m pip install -q -c constraints-floors.txt -e ".[doctor,hf]" $(TESTERS)
	touch $@

.venv-middle/.installed: pyproject.toml
	test -x .venv-middle/bin/python || $(PYTHON) -m venv .venv-middle
	.venv-middle/bin/python -m pip install -q "torch==2.11.0" "transformers==5.12.1" \
		-e ".[doctor,hf]" $(TESTERS)
	touch $@

# Installed anew each time, because the index changes; what is there already is not fetched again.
.PHONY: .venv-newest
.venv-newest:
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -q -U -e ".[doctor,hf]" $(TESTERS)

TESTERS := beartype hypothesis mpmath pytest pytest-xdist pyyaml
RELEASES := tests/attend tests/encodings tests/frequencies tests/models tests/nn tests/hf \
	tests/compare tests/extend tests/inspect tests/report tests/files tests/machine tests/command_line \
	tests/statistics tests/testing \
	tests/test_cli.py tests/test_cookbook.py tests/test_package.py
# Seconds, 0 for any number; what has failed by then is listed.
LIMIT ?= 0
OF_RELEASE = -m pytest -q -rfE -n auto -p no:cacheprovider --tb=short --show-capture=no \
	-W ignore::DeprecationWarning -W ignore::FutureWarning -W ignore::UserWarning \
	-m "not slow and not prose and not nightly" $(RELEASES)

test-floors: .venv-floors/.installed .venv-middle/.installed
	OMP_NUM_THREADS=1 timeout -s INT $(LIMIT) .venv-floors/bin/python $(OF_RELEASE)
	OMP_NUM_THREADS=1 timeout -s INT $(LIMIT) .venv-middle/bin/python $(OF_RELEASE)

test-newest: .venv-newest
	.venv-newest/bin/python -m pip list | grep -E "^(torch|transformers|numpy) "
	OMP_NUM_THREADS=1 timeout -s INT $(LIMIT) .venv-newest/bin/python $(OF_RELEASE)

# What would be published, in dist/: built, checked, installed without and with torch, tried.
.venv-release/.installed:
	test -x .venv-release/bin/python || $(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install -q build twine
	touch $@

release-check: .venv-release/.installed
	.venv-release/bin/python -m tests.release.check $(TAG)

clean:
	rm -rf build .venv .venv-engines .venv-floors .venv-middle .venv-newest .venv-oracles .venv-release .venv-tensorflow .pytest_cache .ruff_cache .hypothesis dist
