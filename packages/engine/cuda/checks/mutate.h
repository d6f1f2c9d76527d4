// Tests of the tests: each wait of a kernel (barriers, waits for cp.async) is taken away by itself, and some check has to fail
// then, or nobody would notice if it was forgotten. On the emulator only, where nothing is compiled anew for it.
#pragma once
#include <string>
#include <vector>

namespace kvtier::cuda::check {

// Prints a JSON line per wait that these checks meet: {"wait":"file:line","found":"name of the check that failed" or null}. Whoever fails says so
// at its first comparison, and is run no further. What takes many times the CPU time that it takes as it is has failed, too; what is only late by
// the clock (KVTIER_MUTATE_LATE_MS) has not: "late" is its name then, beside a "found" that is null.
// `run` runs one of `checks` and returns its exit code; each time in a process of its own.
// Returns an exit code: 1 when a check fails as it is. What nobody misses is not always a defect: see emulator.h.
int Mutate(const std::vector<std::string>& checks, int (*run)(const std::string& name));

}  // namespace kvtier::cuda::check
