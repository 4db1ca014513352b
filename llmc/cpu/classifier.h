// Softmax cross-entropy over a vocabulary that is split over ranks: logits [N, rows] are this rank's columns, of which the
// first valid_rows are tokens (first_row, first_row + 1, ..) and the rest is padding.
//
//   loss = log(sum of exp(x)) - x[target],   dlogits = (exp(x) / sum - [j is target]) scale
//
// classifier_local makes each rank's statistics, the ranks exchange them, classifier_finish ends with all of them.
// Target -1: loss 0, gradient 0. Work is cut into pieces of a row, so that few tokens keep all threads busy too.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "llmc/cpu/vecmath.h"
#include "llmc/device.h"

namespace cpu {

constexpr int classifier_piece = 2048;

struct ClassifierSum {
    float max;
    float sum;  // of exp(x - max)
};

// Statistics [N, 3]: the largest logit here, sum of exp(x - max), the target's logit (-inf where it is not here).
inline void classifier_local(float* stats, const float* logits, const int* targets, int first_row, int valid_rows, int rows,
                             long N, Stream) {
    const long pieces = (valid_rows + classifier_piece - 1) / classifier_piece;
    std::vector<ClassifierSum> sums(size_t(N) * pieces);
#pragma omp parallel for schedule(static)
    for (long work = 0; work < N * pieces; work++) {
        const int first = int(work % pieces) * classifier_piece;
        const float* x = logits + work / pieces * rows + first;
        const int count = std::min(classifier_piece, valid_rows - first);
        const float max = lanes_max(count, [&](int j) { return x[j]; });
        sums[work] = {max, lanes_sum(count, [&](int j) { return exp_fast(x[j] - max); })};
    }
    for (long i = 0; i < N; i++) {
        const ClassifierSum* own = sums.data() + i * pieces;
        float max = -INFINITY;
        for (long p = 0; p < pieces; p++) max = std::max(max, own[p].max);
        double sum = 0;
        for (long p = 0; p < pieces; p++) sum += own[p].sum * std::exp(double(own[p].max) - max);
        const int target = targets[i] - first_row;
        stats[i * 3] = max;
        stats[i * 3 + 1] = float(sum);
        stats[i * 3 + 2] = target >= 0 && target < valid_rows ? logits[i * rows + target] : -INFINITY;
    }
}

// losses [N], and dlogits [N, rows] in place of the logits; with scale 0 the logits stay. stats [tp, N, 3] are all ranks',
// combined in their order: every rank gets the same bits.
inline void classifier_finish(float* losses, float* logits, const float* stats, const int* targets, int first_row,
                              int valid_rows, int rows, int tp, float scale, long N, Stream) {
    struct Token {
        float max;
        float factor;  // scale / sum of exp(x - max)
    };
    std::vector<Token> tokens(N);
    for (long i = 0; i < N; i++) {
        auto stat = [&](int rank, int which) { return double(stats[(rank * N + i) * 3 + which]); };
        double max = -INFINITY, sum = 0, target = -INFINITY;
        for (int r = 0; r < tp; r++) max = std::max(max, stat(r, 0));
        for (int r = 0; r < tp; r++) {
            if (stat(r, 1) != 0) sum += stat(r, 1) * std::exp(stat(r, 0) - max);  // 0: only padding there
            target = std::max(target, stat(r, 2));
        }
        losses[i] = targets[i] < 0 ? 0.0f : float(max + std::log(sum) - target);
        tokens[i] = {float(max), float(scale / sum)};
    }
    if (scale == 0.0f) return;
    const long pieces = (rows + classifier_piece - 1) / classifier_piece;
#pragma omp parallel for schedule(static)
    for (long work = 0; work < N * pieces; work++) {
        const long i = work / pieces;
        const int first = int(work % pieces) * classifier_piece, count = std::min(classifier_piece, rows - first);
        const int valid = targets[i] < 0 ? 0 : std::clamp(valid_rows - first, 0, count);
        const int target = targets[i] - first_row - first;
        const float max = tokens[i].max, factor = tokens[i].factor;
        float* x = logits + i * rows + first;
        const float target_logit = target >= 0 && target < valid ? x[target] : 0.0f;
        const auto element = [=](size_t j) { x[j] = exp_fast(x[j] - max) * factor; };
        vector_sweep(0, size_t(valid), element, x);
        std::memset(x + valid, 0, (count - valid) * sizeof(float));
        if (target >= 0 && target < valid) x[target] = std::fma(exp_fast(target_logit - max), factor, -scale);
    }
}

}  // namespace cpu
