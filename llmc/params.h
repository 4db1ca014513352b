// The model is a table: every parameter with its shape, how it is cut over tensor-parallel ranks, how it starts and
// whether it decays. Allocation, init, checkpoints, gradient reduction, the global norm and AdamW walk this table.
//
// A matrix is [rows = out, cols = in] in memory; a vector is [rows, 1]. Replicated parameters come first in the flat
// buffer, so that [0, replicated) of the gradients is reduced over tp in one go and counted once in the norm.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "llmc/config.h"
#include "llmc/rng.h"

enum class Shard {
    none,   // replicated
    row,    // cut along `out`, inside each part (q|k|v): column-parallel in Megatron's words
    col,    // cut along `in`: row-parallel
    vocab,  // cut along `out`, padded to equal pieces
};

struct Param {
    std::string name;  // Hugging Face's
    long rows, cols;   // full and unpadded
    Shard shard;
    std::vector<long> parts;  // rows of each fused part; one part for a plain matrix
    bool conv1d;              // stored [in, out] on disk (GPT-2's Conv1D): transposed on the way in and out
    float mean, std;          // initial values: normal(mean, std)
    bool decay;               // weight decay applies

    long local_rows = 0, local_cols = 0;  // this rank's piece, padding included
    size_t offset = 0;                    // of the piece in the flat local buffer, in elements
    size_t local_size() const { return size_t(local_rows) * local_cols; }
};

struct ParamTable {
    std::vector<Param> list;
    int tp = 1, tp_rank = 0;
    size_t replicated = 0;  // elements of the replicated parameters, all at the front of the flat buffer
    size_t local_size = 0;  // elements of the flat local buffer
    size_t full_size = 0;   // parameters of the whole model, unpadded
};

// Vocabulary rows of one rank: padded so that every rank has the same number, a multiple of 64.
inline long vocab_rows(long vocab, int tp) { return (vocab + 64L * tp - 1) / (64L * tp) * 64; }

inline ParamTable param_table_make(const ModelConfig& c, int tp, int tp_rank) {
    const long C = c.channels, F = c.ffn;
    check(c.heads % tp == 0, "%d heads do not divide over --tp %d: choose a tp that divides the heads", c.heads, tp);
    check(F % tp == 0, "an MLP of width %ld does not divide over --tp %d: choose a tp that divides it", F, tp);
    ParamTable table;
    table.tp = tp;
    table.tp_rank = tp_rank;
    const float out_std = c.init_std / std::sqrt(2.0f * float(c.layers));  // residual projections, as GPT-2
    auto matrix = [&](const std::string& name, long rows, long cols, Shard shard, std::vector<long> parts, bool conv1d,
                      float std) {
        table.list.push_back({"transformer." + name, rows, cols, shard, std::move(parts), conv1d, 0.0f, std, true});
    };
    auto vector = [&](const std::string& name, long rows, Shard shard, std::vector<long> parts, float mean) {
        table.list.push_back({"transformer." + name, rows, 1, shard, std::move(parts), false, mean, 0.0f, false});
    };
    auto norm = [&](const std::string& name) {
        vector(name + ".weight", C, Shard::none, {C}, 1.0f);
        vector(name + ".bias", C, Shard::none, {C}, 0.0f);
    };
    matrix("wte.weight", c.vocab, C, Shard::vocab, {c.vocab}, false, c.init_std);
    matrix("wpe.weight", c.positions, C, Shard::none, {c.positions}, false, c.init_std);
    for (int l = 0; l < c.layers; l++) {
        const std::string h = "h." + std::to_string(l) + ".";
        norm(h + "ln_1");
        matrix(h + "attn.c_attn.weight", 3 * C, C, Shard::row, {C, C, C}, true, c.init_std);
        vector(h + "attn.c_attn.bias", 3 * C, Shard::row, {C, C, C}, 0.0f);
        matrix(h + "attn.c_proj.weight", C, C, Shard::col, {C}, true, out_std);
        vector(h + "attn.c_proj.bias", C, Shard::none, {C}, 0.0f);
        norm(h + "ln_2");
        matrix(h + "mlp.c_fc.weight", F, C, Shard::row, {F}, true, c.init_std);
        vector(h + "mlp.c_fc.bias", F, Shard::row, {F}, 0.0f);
        matrix(h + "mlp.c_proj.weight", C, F, Shard::col, {C}, true, out_std);
        vector(h + "mlp.c_proj.bias", C, Shard::none, {C}, 0.0f);
    }
    norm("ln_f");
    if (!c.tied) table.list.push_back({"lm_head.weight", c.vocab, C, Shard::vocab, {c.vocab}, false, 0.0f, c.init_std, true});

    for (Param& p : table.list) {
        p.local_rows = p.shard == Shard::row ? p.rows / tp : p.shard == Shard::vocab ? vocab_rows(p.rows, tp) : p.rows;
        p.local_cols = p.shard == Shard::col ? p.cols / tp : p.cols;
        table.full_size += size_t(p.rows) * p.cols;
    }
    for (bool replicated : {true, false}) {
        for (Param& p : table.list) {
            if ((p.shard == Shard::none) != replicated) continue;
            p.offset = table.local_size;
            table.local_size += (p.local_size() + 15) / 16 * 16;  // 64-byte aligned; the gap stays zero
        }
        if (replicated) table.replicated = table.local_size;
    }
    return table;
}

inline const Param& param_find(const ParamTable& table, const std::string& name) {
    for (const Param& p : table.list) {
        if (p.name == name) return p;
    }
    fail("no parameter is called '%s'", name.c_str());
}

// A rectangle of a rank's piece and where it lies in the full matrix.
struct ParamBlock {
    long local_row, global_row, rows;
    long global_col, cols;  // local columns are [0, cols)
};

// The rectangles that make up rank `tp_rank`'s piece; padding belongs to none.
inline std::vector<ParamBlock> param_blocks(const Param& p, int tp, int tp_rank) {
    if (p.shard == Shard::none) return {{0, 0, p.rows, 0, p.cols}};
    if (p.shard == Shard::col) return {{0, 0, p.rows, tp_rank * p.local_cols, p.local_cols}};
    if (p.shard == Shard::vocab) {
        const long first = tp_rank * p.local_rows, rows = std::min(p.local_rows, p.rows - first);
        if (rows <= 0) return {};
        return {{0, first, rows, 0, p.cols}};
    }
    std::vector<ParamBlock> blocks;
    long local_row = 0, part_begin = 0;
    for (long part : p.parts) {
        const long rows = part / tp;
        blocks.push_back({local_row, part_begin + tp_rank * rows, rows, 0, p.cols});
        local_row += rows;
        part_begin += part;
    }
    return blocks;
}

// Each value is a function of (seed, name, global element index) alone: the same weights at every tp, to the bit.
inline void params_init(const ParamTable& table, float* params, uint64_t seed) {
    for (const Param& p : table.list) {
        const uint64_t key = seed ^ hash_name(p.name);
        for (const ParamBlock& block : param_blocks(p, table.tp, table.tp_rank)) {
#pragma omp parallel for
            for (long r = 0; r < block.rows; r++) {
                float* row = params + p.offset + (block.local_row + r) * p.local_cols;
                const uint64_t first = uint64_t(block.global_row + r) * p.cols + block.global_col;
                if (p.std == 0.0f) {
                    std::fill_n(row, block.cols, p.mean);
                    continue;
                }
                std::array<float, 4> normal;
                for (long i = 0; i < block.cols; i++) {
                    const uint64_t element = first + i;
                    if (i == 0 || element % 4 == 0) normal = normals_from_bits(philox(key, element / 4, 0));
                    row[i] = p.mean + p.std * normal[element % 4];
                }
            }
        }
    }
}
