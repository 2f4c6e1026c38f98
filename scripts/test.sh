#!/usr/bin/env bash
# `make test`: both engines' environments are installed beside the tests of the code, then come the tests in engines.
# Installing waits for the network most of the time; one after the other all took 24 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."

logs=$(mktemp -d)
declare -A installing

end() {
    for leader in "${installing[@]}"; do kill -- "-$leader" 2>/dev/null || true; done
    rm -rf "$logs"
}
trap end EXIT

for engine in vllm sglang; do
    # A session of its own, which `end` can end with all its children; nice, because some tests measure seconds.
    setsid nice scripts/setup_engine.sh "$engine" >"$logs/$engine" 2>&1 &
    installing[$engine]=$!
done
make --no-print-directory lint types test-interpreter test-code
for engine in vllm sglang; do
    wait "${installing[$engine]}" || {
        cat "$logs/$engine" >&2
        echo "test: scripts/setup_engine.sh $engine failed; above is what it said." >&2
        exit 1
    }
    unset "installing[$engine]"
    make --no-print-directory "test-$engine"
done
