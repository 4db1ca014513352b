// Errors that end all ranks together: one message, a non-zero status on each, nobody left waiting.
#pragma once
#include "llmc/comm/comm.h"

// Known to every rank of the run: main prints it once and all ranks leave.
struct AgreedError : Error {
    using Error::Error;
};

// Collective. If any rank has an error, the lowest such rank's is thrown on all of them.
inline void agree(Comm& world, const std::string& error) {
    if (all_reduce_max(world, error.empty() ? 0.0 : 1.0) == 0.0) return;
    for (const std::string& text : gather_text(world, error)) {
        if (!text.empty()) throw AgreedError(text);
    }
}

// Runs `work` on this rank, then all ranks agree on how it went. `work` may not communicate after it can have failed.
template <class Work>
void together(Comm& world, Work work) {
    std::string error;
    try {
        work();
    } catch (const std::exception& e) {
        error = e.what();
    }
    agree(world, error);
}
