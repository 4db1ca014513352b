// The choice of the next token.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <limits>
#include <map>

#include "llmc/sampler.h"

static const float inf = std::numeric_limits<float>::infinity();

// How often each token is picked over an even grid of uniform numbers.
static std::map<int, double> shares(const std::vector<float>& logits, float temperature, int top_k) {
    std::map<int, double> found;
    const int count = 100000;
    for (int i = 0; i < count; i++)
        found[sample_token(logits.data(), int(logits.size()), temperature, top_k, (i + 0.5) / count)] += 1.0 / count;
    return found;
}

TEST_CASE("temperature 0 takes the largest, the first of equals") {
    const std::vector<float> logits = {1, 3, 2, 3};
    for (const double u : {0.0, 0.5, 0.999999}) CHECK(sample_token(logits.data(), 4, 0, 0, u) == 1);
}

TEST_CASE("probabilities are the softmax of logits over temperature") {
    // ln 1, ln 2, ln 5, shifted: 1/8, 2/8, 5/8; at temperature 1/2 the weights are squared: 1/30, 4/30, 25/30.
    const std::vector<float> logits = {100.0f, 100.0f + std::log(2.0f), 100.0f + std::log(5.0f)};
    const auto plain = shares(logits, 1, 0);
    CHECK(plain.at(0) == doctest::Approx(0.125).epsilon(1e-3));
    CHECK(plain.at(1) == doctest::Approx(0.25).epsilon(1e-3));
    CHECK(plain.at(2) == doctest::Approx(0.625).epsilon(1e-3));
    const auto cold = shares(logits, 0.5f, 0);
    CHECK(cold.at(0) == doctest::Approx(1.0 / 30).epsilon(1e-3));
    CHECK(cold.at(2) == doctest::Approx(25.0 / 30).epsilon(1e-3));
    // Tokens lie along [0, 1) in the order of their ids.
    CHECK(sample_token(logits.data(), 3, 1, 0, 0.0) == 0);
    CHECK(sample_token(logits.data(), 3, 1, 0, 0.1249) == 0);
    CHECK(sample_token(logits.data(), 3, 1, 0, 0.1251) == 1);
    CHECK(sample_token(logits.data(), 3, 1, 0, std::nextafter(1.0, 0.0)) == 2);
}

TEST_CASE("top_k keeps the k largest, of equals the first") {
    const std::vector<float> logits = {0, 2, 1, 2, 1, 1};
    const auto three = shares(logits, 1, 3);
    CHECK(three.size() == 3);
    CHECK(three.count(1) == 1);
    CHECK(three.count(3) == 1);
    CHECK(three.count(2) == 1);  // not 4 or 5, which are as large
    CHECK(three.at(1) == doctest::Approx(three.at(3)).epsilon(1e-3));
    CHECK(three.at(1) / three.at(2) == doctest::Approx(std::exp(1.0)).epsilon(1e-3));
    CHECK(shares(logits, 1, 1).size() == 1);
    CHECK(shares(logits, 1, 6) == shares(logits, 1, 0));
    CHECK(shares(logits, 1, 600) == shares(logits, 1, 0));
}

TEST_CASE("top_k of a long row") {
    std::vector<float> logits(5000);  // distinct, scrambled: 7919 has no factor in common with 5000
    for (int i = 0; i < 5000; i++) logits[i] = float(i * 7919 % 5000) * 1e-4f;
    const auto found = shares(logits, 1, 40);
    CHECK(found.size() == 40);
    for (const auto& [token, share] : found) CHECK(logits[token] > 4959.5f * 1e-4f);
}

TEST_CASE("padded tokens are never picked") {
    const std::vector<float> logits = {-inf, 1, -inf, 1, -inf};
    const auto found = shares(logits, 1, 0);
    CHECK(found.size() == 2);
    CHECK(sample_token(logits.data(), 5, 1, 0, 0.0) == 1);
    CHECK(sample_token(logits.data(), 5, 1, 4, std::nextafter(1.0, 0.0)) == 3);
    CHECK(sample_token(logits.data(), 5, 1e-30f, 0, 0.7) == 3);  // exponents overflow to -inf, not to NaN
}

TEST_CASE("a diverged model is refused") {
    const std::vector<float> nan = {0, std::numeric_limits<float>::quiet_NaN()}, infinite = {0, inf}, masked = {-inf, -inf};
    CHECK_THROWS_WITH(sample_token(nan.data(), 2, 1, 0, 0.5), doctest::Contains("token 1 is NaN"));
    CHECK_THROWS_WITH(sample_token(infinite.data(), 2, 1, 0, 0.5), doctest::Contains("inf"));
    CHECK_THROWS_WITH(sample_token(masked.data(), 2, 0, 0, 0.5), doctest::Contains("diverged"));
    CHECK_THROWS_AS(sample_token(nan.data(), 0, 1, 0, 0.5), Error);
}
