// Learning rate of a step. Steps count from 0, so the first update already has a rate above 0.
//
//   warm-up    step < warmup: lr (step + 1) / (warmup + 1), in every schedule
//   cosine     from lr down half a cosine to min_lr at decay_steps (nanoGPT's formula)
//   linear     from lr down a straight line to min_lr at decay_steps
//   constant   lr
//   wsd        warm-up, stable, decay: lr, then over the last fifth of decay_steps a straight line down to min_lr
// From decay_steps on all but `constant` stay at min_lr.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>

#include "llmc/check.h"

enum class Schedule { cosine, linear, constant, wsd };
inline constexpr const char* schedule_names = "cosine|linear|constant|wsd";

inline Schedule schedule_parse(const std::string& name) {
    if (name == "cosine") return Schedule::cosine;
    if (name == "linear") return Schedule::linear;
    if (name == "constant") return Schedule::constant;
    if (name == "wsd") return Schedule::wsd;
    fail("schedule '%s' is not known; allowed: %s", name.c_str(), schedule_names);
}

inline float learning_rate(Schedule schedule, long step, float lr, float min_lr, long warmup, long decay_steps) {
    if (step < warmup) return float(double(lr) * double(step + 1) / double(warmup + 1));
    if (schedule == Schedule::constant) return lr;
    if (step >= decay_steps) return min_lr;
    const long begin = schedule == Schedule::wsd ? std::max(warmup, decay_steps - decay_steps / 5) : warmup;
    if (step <= begin) return lr;
    const double done = double(step - begin) / double(decay_steps - begin);  // in (0, 1)
    const double left = schedule == Schedule::cosine ? 0.5 * (1.0 + std::cos(3.14159265358979323846 * done)) : 1.0 - done;
    return float(min_lr + left * (double(lr) - double(min_lr)));
}
