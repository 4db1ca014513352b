// The next token from a row of logits [V]: softmax(logits / temperature) over the top_k largest, inverted at a given
// uniform number. A pure function: the caller draws `uniform` from a counter-based generator, so that all ranks, holding
// the same logits, pick the same token. Softmax and sums are in double.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "llmc/check.h"

// temperature 0: the largest logit, the first one of equals. top_k 0: all tokens; of equal logits the first ones are kept.
// A logit of -inf (a padded token) is never picked. `uniform` is in [0, 1).
inline int sample_token(const float* logits, int V, float temperature, int top_k, double uniform) {
    check(V > 0, "sampling: the row of logits is empty");
    int best = 0;
    for (int i = 0; i < V; i++) {
        check(!std::isnan(logits[i]), "sampling: the logit of token %d is NaN; the model has diverged", i);
        if (logits[i] > logits[best]) best = i;
    }
    check(std::isfinite(logits[best]), "sampling: the largest logit, of token %d, is %g; the model has diverged", best,
          double(logits[best]));
    if (temperature <= 0.0f) return best;

    std::vector<int> tokens(V);
    std::iota(tokens.begin(), tokens.end(), 0);
    if (top_k > 0 && top_k < V) {
        std::nth_element(tokens.begin(), tokens.begin() + top_k - 1, tokens.end(),
                         [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
        tokens.resize(top_k);
        std::sort(tokens.begin(), tokens.end());  // sums in the order of ids, whatever nth_element left
    }
    std::vector<double> sums(tokens.size());
    double sum = 0;
    for (size_t i = 0; i < tokens.size(); i++) {
        sum += std::exp((double(logits[tokens[i]]) - double(logits[best])) / double(temperature));
        sums[i] = sum;
    }
    // The first token whose running sum exceeds the target: one of weight 0 never is, its sum equals its predecessor's.
    const size_t picked = std::upper_bound(sums.begin(), sums.end(), uniform * sum) - sums.begin();
    return picked < tokens.size() ? tokens[picked] : best;  // uniform * sum may round up to sum
}
