// train_gpt.cu: a GPT trainer, top to bottom: weights, activations, forward, backward, update, validation, samples, loop.
//
// Tensor parallel after Megatron (arXiv 1909.08053, 2205.05198): qkv and fc are cut by columns, the projections back by
// rows, embedding and classifier by vocabulary. Wherever activations or gradients cross between ranks there is a named
// boundary (llmc/comm/boundary.h) that encodes them with TACO or another codec on the way.
//
// Shapes: B sequences of T tokens, N = B T; n = the residual stream's tokens on this rank: N / tp under sequence
// parallelism, else N. C channels, NH heads of HS, F the MLP's width, V the vocabulary. Local (1/tp) sizes end in _l.
#include <omp.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "llmc/ckpt/checkpoint.h"
#include "llmc/comm/agree.h"
#include "llmc/comm/boundary.h"
#include "llmc/comm/mesh.h"
#include "llmc/config.h"
#include "llmc/data/tokenizer.h"
#include "llmc/data/tokens.h"
#include "llmc/device.h"
#include "llmc/log.h"
#include "llmc/ops.h"
#include "llmc/options.h"
#include "llmc/params.h"
#include "llmc/peak.h"
#include "llmc/sampler.h"
#include "llmc/schedule.h"
#include "llmc/trace.h"

// ---------------------------------------------------------------------------------------------------------------------
// Weights and activations

// Pointers into a flat buffer laid out by the parameter table: weights (floatX) or gradients (float).
template <class E>
struct LayerWeights {
    E *ln1_w, *ln1_b;    // [C]
    E *qkv_w, *qkv_b;    // [3 C_l, C], [3 C_l]: q | k | v
    E *proj_w, *proj_b;  // [C, C_l], [C]
    E *ln2_w, *ln2_b;    // [C]
    E *fc_w, *fc_b;      // [F_l, C], [F_l]
    E *out_w, *out_b;    // [C, F_l], [C]
};

template <class E>
struct Weights {
    E *wte, *wpe;      // [V_l, C], [positions, C]
    E *lnf_w, *lnf_b;  // [C]
    E* head;           // [V_l, C]; wte itself when tied
    std::vector<LayerWeights<E>> layer;
};

template <class E>
Weights<E> weights_bind(const ParamTable& table, const ModelConfig& config, E* base) {
    auto at = [&](const std::string& name) { return base + param_find(table, name).offset; };
    Weights<E> w;
    w.wte = at("transformer.wte.weight");
    w.wpe = at("transformer.wpe.weight");
    w.lnf_w = at("transformer.ln_f.weight");
    w.lnf_b = at("transformer.ln_f.bias");
    w.head = config.tied ? w.wte : at("lm_head.weight");
    for (int l = 0; l < config.layers; l++) {
        const std::string h = "transformer.h." + std::to_string(l) + ".";
        w.layer.push_back({at(h + "ln_1.weight"), at(h + "ln_1.bias"), at(h + "attn.c_attn.weight"), at(h + "attn.c_attn.bias"),
                           at(h + "attn.c_proj.weight"), at(h + "attn.c_proj.bias"), at(h + "ln_2.weight"), at(h + "ln_2.bias"),
                           at(h + "mlp.c_fc.weight"), at(h + "mlp.c_fc.bias"), at(h + "mlp.c_proj.weight"),
                           at(h + "mlp.c_proj.bias")});
    }
    return w;
}

// What a block keeps for its backward. `qkv_in` and `fc_in` are the normed inputs of the column-parallel layers: [N, C]
// floatX, or, under sequence parallelism, the gathered wire bytes of tp stripes, decoded again in backward.
struct LayerActivations {
    floatX* x;             // [n, C] the residual stream at the block's entry
    float *mean1, *rstd1;  // [n]
    uint8_t* qkv_in;       // see above
    floatX* qkv;           // [N, 3 C_l]
    floatX* att;           // [N, C_l]
    float* lse;            // [B, NH_l, T]
    floatX* x_mid;         // [n, C] the residual stream after attention
    float *mean2, *rstd2;  // [n]
    uint8_t* fc_in;        // see above
    floatX* fc;            // [N, F_l] before gelu
    floatX* gelu;          // [N, F_l]
};

struct Activations {
    std::vector<LayerActivations> layer;
    int *ids, *targets;    // [N]
    floatX* x_out;         // [n, C] the residual stream after the last block
    float *meanf, *rstdf;  // [n]
    uint8_t* head_in;      // like qkv_in
    floatX* normed;        // [n, C] a norm's output before it is gathered
    floatX* gathered;      // [N, C] decoded from wire bytes
    floatX* partial;       // [N, C] this rank's summand of a row-parallel output
    floatX* reduced;       // [n, C] the sum over ranks
    floatX* logits;        // [head_chunk, V_l]
    float* stats;          // [tp, head_chunk, 3]
    float* losses;         // [N]
    floatX* dx;            // [n, C] gradient of the residual stream
    floatX* dfc;           // [N, F_l]
    floatX* dqkv;          // [N, 3 C_l]
    floatX* datt;          // [N, C_l]
    uint8_t* wire;         // bytes of gradients on their way in an all-gather
};

enum class Recompute { none, gelu, block };

struct Model {
    ModelConfig config;
    Recompute recompute = Recompute::none;
    bool master_weights = true;
    int C_l, NH_l, HS, F_l, V_l;   // local sizes
    int vocab_first, vocab_valid;  // the rows [first, first + valid) of the vocabulary are here; V_l - valid are padding
    int head_chunk;                // tokens whose logits are in memory at a time
    bool gathers;                  // sequence parallel: boundaries are all-gathers and reduce-scatters
    bool reduces;                  // tp > 1 without sequence parallelism: boundaries are all-reduces

    int B, T;        // the batch in work
    long N, n;       // its tokens, and those of the residual stream here
    long first_tok;  // this rank's first token in the flattened B x T

    ParamTable table;
    Arena arena;
    floatX* params;                  // [table.local_size]
    float* master;                   // [table.local_size] float32 beside 16-bit params; null: none
    float *grads, *adam_m, *adam_v;  // [table.local_size]
    Weights<floatX> w;
    Weights<float> g;
    Activations act;
    Boundaries boundaries;
    Pending gathering;  // the input of the next column-parallel layer, on its way
    Comm* tp;
    Device device;
    Stream stream;  // of all compute
};

void model_set_batch(Model& m, int B, int T) {
    m.B = B;
    m.T = T;
    m.N = long(B) * T;
    m.n = m.gathers ? m.N / m.tp->size : m.N;
    m.first_tok = m.gathers ? m.tp->rank * m.n : 0;
}

// Lays out all memory of a run in the arena: called once to count and once to place.
void model_plan(Model& m) {
    Arena& arena = m.arena;
    Activations& a = m.act;
    const long C = m.config.channels, N = m.N, n = m.n, stripe = N / m.tp->size * C;
    const size_t size = m.table.local_size;
    m.params = arena_take<floatX>(arena, size, "parameters");
    m.master = sizeof(floatX) < sizeof(float) && m.master_weights ? arena_take<float>(arena, size, "parameters") : nullptr;
    m.grads = arena_take<float>(arena, size, "gradients");
    m.adam_m = arena_take<float>(arena, size, "AdamW m, v");
    m.adam_v = arena_take<float>(arena, size, "AdamW m, v");
    auto kept_input = [&](BoundaryId id, const char* label) {
        return arena_take<uint8_t>(arena, m.gathers ? gather_wire_bytes(m.boundaries, id, stripe) : N * C * sizeof(floatX),
                                   label);
    };
    a.layer.resize(m.config.layers);
    for (int l = 0; l < m.config.layers; l++) {
        LayerActivations& s = a.layer[l];
        const char* label = "activations";
        if (l > 0 && m.recompute == Recompute::block) {
            s = a.layer[0];  // one set serves all blocks
            s.x = arena_take<floatX>(arena, n * C, label);
            continue;
        }
        s.x = arena_take<floatX>(arena, n * C, label);
        s.mean1 = arena_take<float>(arena, n, label);
        s.rstd1 = arena_take<float>(arena, n, label);
        s.qkv_in = kept_input(attn_in_fwd, label);
        s.qkv = arena_take<floatX>(arena, N * 3 * m.C_l, label);
        s.att = arena_take<floatX>(arena, N * m.C_l, label);
        s.lse = arena_take<float>(arena, N * m.NH_l, label);
        s.x_mid = arena_take<floatX>(arena, n * C, label);
        s.mean2 = arena_take<float>(arena, n, label);
        s.rstd2 = arena_take<float>(arena, n, label);
        s.fc_in = kept_input(mlp_in_fwd, label);
        s.fc = arena_take<floatX>(arena, N * m.F_l, label);
        s.gelu = m.recompute == Recompute::gelu && l > 0 ? a.layer[0].gelu : arena_take<floatX>(arena, N * m.F_l, label);
    }
    const char* label = "buffers";
    a.ids = arena_take<int>(arena, N, label);
    a.targets = arena_take<int>(arena, N, label);
    a.x_out = arena_take<floatX>(arena, n * C, label);
    a.meanf = arena_take<float>(arena, n, label);
    a.rstdf = arena_take<float>(arena, n, label);
    a.head_in = kept_input(head_fwd, label);
    a.partial = arena_take<floatX>(arena, N * C, label);
    a.normed = m.gathers ? arena_take<floatX>(arena, n * C, label) : nullptr;
    a.gathered = m.gathers ? arena_take<floatX>(arena, N * C, label) : nullptr;
    a.reduced = m.gathers ? arena_take<floatX>(arena, n * C, label) : a.partial;
    a.losses = arena_take<float>(arena, N, label);
    a.dx = arena_take<floatX>(arena, n * C, label);
    a.dfc = arena_take<floatX>(arena, N * m.F_l, label);
    a.dqkv = arena_take<floatX>(arena, N * 3 * m.C_l, label);
    a.datt = arena_take<floatX>(arena, N * m.C_l, label);
    a.logits = arena_take<floatX>(arena, size_t(m.head_chunk) * m.V_l, "logits");
    a.stats = arena_take<float>(arena, size_t(m.tp->size) * m.head_chunk * 3, "logits");
    if (m.gathers) {
        size_t bytes = 0;
        for (BoundaryId id : {embed_bwd, attn_out_bwd, mlp_out_bwd})
            bytes = std::max(bytes, gather_wire_bytes(m.boundaries, id, stripe));
        a.wire = arena_take<uint8_t>(arena, bytes, "wire");
    }
    m.boundaries.workspace = arena_take<uint8_t>(arena, boundary_workspace_bytes(m.boundaries, stripe), "wire");
    m.boundaries.counters = reinterpret_cast<BoundaryDeviceCounters*>(arena_take<uint8_t>(arena, boundary_counters_bytes(), "wire"));
}

// Weights and AdamW's moments where the host can reach them, [table.local_size] float32 each: the model's own memory on the
// cpu target, elsewhere a copy.
struct HostState {
    std::vector<float> copy;
    float *params, *adam_m, *adam_v;
};

HostState host_state_make(Model& m) {
    HostState host{{}, reinterpret_cast<float*>(m.params), m.adam_m, m.adam_v};
    if (device_is_host) return host;
    const size_t size = m.table.local_size;
    host.copy.resize(3 * size);
    host.params = host.copy.data();
    host.adam_m = host.params + size;
    host.adam_v = host.adam_m + size;
    return host;
}

// From the device. Between steps the gradients' memory is free, so it takes what is cast.
void host_state_read(HostState& host, Model& m) {
    if (device_is_host) return;
    const size_t size = m.table.local_size, bytes = size * sizeof(float);
    if (!m.master) op::cast(m.grads, m.params, size, m.stream);
    device_download(host.params, m.master ? m.master : m.grads, bytes, m.stream);
    device_download(host.adam_m, m.adam_m, bytes, m.stream);
    device_download(host.adam_v, m.adam_v, bytes, m.stream);
}

// To the device.
void host_state_write(Model& m, const HostState& host) {
    if (device_is_host) return;
    const size_t size = m.table.local_size, bytes = size * sizeof(float);
    float* weights = m.master ? m.master : m.grads;
    device_upload(weights, host.params, bytes, m.stream);
    op::cast(m.params, weights, size, m.stream);
    device_upload(m.adam_m, host.adam_m, bytes, m.stream);
    device_upload(m.adam_v, host.adam_v, bytes, m.stream);
}

// Allocates everything for micro-batches of B x T. `boundaries` is configured; weights are not set yet.
void model_make(Model& m, const ModelConfig& config, Comm& tp, bool sequence_parallel, Recompute recompute, int B, int T) {
    check(long(B) * T % tp.size == 0, "--micro-batch %d x --seq %d = %ld tokens do not divide over --tp %d", B, T, long(B) * T,
          tp.size);
    check(T <= config.positions, "--seq %d is longer than the model's %d positions", T, config.positions);
    m.config = config;
    m.recompute = recompute;
    m.tp = &tp;
    m.gathers = sequence_parallel && tp.size > 1;
    m.reduces = !sequence_parallel && tp.size > 1;
    m.table = param_table_make(config, tp.size, tp.rank);
    m.C_l = config.channels / tp.size;
    m.NH_l = config.heads / tp.size;
    m.HS = config.channels / config.heads;
    m.F_l = config.ffn / tp.size;
    m.V_l = int(vocab_rows(config.vocab, tp.size));
    m.vocab_first = tp.rank * m.V_l;
    m.vocab_valid = std::clamp(config.vocab - m.vocab_first, 0, m.V_l);
    const long chunk_bytes = 64L << 20;  // a large vocabulary's logits would dwarf all other activations
    m.head_chunk = int(std::clamp(chunk_bytes / (m.V_l * long(sizeof(floatX))), 1L, long(B) * T));
    model_set_batch(m, B, T);
    model_plan(m);
    arena_allocate(m.arena);
    model_plan(m);
    m.w = weights_bind(m.table, config, m.params);
    m.g = weights_bind(m.table, config, m.grads);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensor-parallel boundaries, as the model sees them

// Where the norm before a column-parallel layer writes: to where it is kept, or to where it is gathered from.
floatX* norm_output(Model& m, uint8_t* kept) { return m.gathers ? m.act.normed : reinterpret_cast<floatX*>(kept); }

// Where a gather's tokens [N, C] are read: the wire bytes themselves if they are the values, else what they decode to.
floatX* gather_output(Model& m, BoundaryId id, uint8_t* wire) {
    const bool raw = gather_is_raw(m.boundaries, id, size_t(m.n) * m.config.channels);
    return raw ? reinterpret_cast<floatX*>(wire) : m.act.gathered;
}

// Sends what the norm wrote on its way to the column-parallel layer that `next` names; next.wire is where its input is kept.
void column_input_begin(Model& m, const NextGather& next, bool encoded) {
    const size_t stripe = size_t(m.n) * m.config.channels;
    if (!m.gathers) return;
    m.gathering = encoded ? gather_begin_encoded(m.boundaries, next.id, next.layer, next.wire, stripe, m.stream)
                          : gather_begin(m.boundaries, next.id, next.layer, m.act.normed, next.wire, stripe, m.stream);
}

// The full input of that layer, [N, C].
floatX* column_input(Model& m, uint8_t* kept) {
    if (!m.gathers) return reinterpret_cast<floatX*>(kept);
    floatX* out = gather_output(m, m.gathering.id, kept);
    gather_finish(m.boundaries, m.gathering, out, m.stream);
    return out;
}

// The same in backward, from what was kept.
floatX* column_input_again(Model& m, BoundaryId id, uint8_t* kept) {
    const size_t stripe = size_t(m.n) * m.config.channels;
    if (!m.gathers || gather_is_raw(m.boundaries, id, stripe)) return reinterpret_cast<floatX*>(kept);
    gather_decode(m.boundaries, id, m.act.gathered, kept, stripe, m.stream);
    return m.act.gathered;
}

// The gradient of a row-parallel layer's output, for all tokens: [N, C].
floatX* row_output_gradient(Model& m, BoundaryId id, int layer) {
    if (!m.gathers) return m.act.dx;
    floatX* out = gather_output(m, id, m.act.wire);
    Pending pending = gather_begin(m.boundaries, id, layer, m.act.dx, m.act.wire, size_t(m.n) * m.config.channels, m.stream);
    gather_finish(m.boundaries, pending, out, m.stream);
    return out;
}

// Sums act.partial [N, C] over the ranks; returns this rank's tokens of it, [n, C].
floatX* partial_reduce(Model& m, BoundaryId id, int layer) {
    Activations& a = m.act;
    const size_t stripe = size_t(m.N / m.tp->size) * m.config.channels;
    if (m.gathers) {
        Pending pending = reduce_scatter_begin(m.boundaries, id, layer, a.partial, stripe, m.stream);
        reduce_scatter_finish(m.boundaries, pending, a.reduced, m.stream);
    } else if (m.reduces) {
        Pending pending = all_reduce_begin(m.boundaries, id, layer, a.partial, stripe, m.stream);
        all_reduce_finish(m.boundaries, pending, m.stream);
    }
    return a.reduced;
}

// The end of a row-parallel layer and the norm that follows: act.partial is summed over the ranks, bias and residual are added,
// and the norm's output is on its way to the next column-parallel layer. norm.out is set here.
void partial_reduce_norm(Model& m, BoundaryId id, int layer, ResidualNorm<floatX> norm, const NextGather& next) {
    Activations& a = m.act;
    const size_t stripe = size_t(m.N / m.tp->size) * m.config.channels;
    bool encoded = false;
    norm.out = norm_output(m, next.wire);
    if (m.gathers) {
        Pending pending = reduce_scatter_begin(m.boundaries, id, layer, a.partial, stripe, m.stream);
        encoded = reduce_scatter_finish_norm(m.boundaries, pending, norm, &next, a.reduced, m.stream);
    } else if (m.reduces) {
        Pending pending = all_reduce_begin(m.boundaries, id, layer, a.partial, stripe, m.stream);
        all_reduce_finish_norm(m.boundaries, pending, norm, m.stream);
    } else {
        op::residual_layernorm_forward(norm.residual, norm.out, norm.mean, norm.rstd, norm.a, a.partial, norm.add_bias, norm.weight,
                                       norm.bias, m.n, norm.C, norm.eps, m.stream);
    }
    column_input_begin(m, next, encoded);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// The norm at a block's entry, alone: for the first block, and to compute a block again.
void block_norm_forward(Model& m, int l) {
    const LayerWeights<floatX>& w = m.w.layer[l];
    LayerActivations& s = m.act.layer[l];
    op::layernorm_forward(norm_output(m, s.qkv_in), s.mean1, s.rstd1, s.x, w.ln1_w, w.ln1_b, m.n, m.config.channels,
                          m.config.eps, m.stream);
    column_input_begin(m, {attn_in_fwd, l, s.qkv_in}, false);
}

// One block up to the MLP's hidden layer, which is where its backward starts. The norm of s.x is done already.
void block_forward(Model& m, int l) {
    const int C = m.config.channels;
    const LayerWeights<floatX>& w = m.w.layer[l];
    LayerActivations& s = m.act.layer[l];
    SpanScope span(m.boundaries.spans, "block_forward", "compute", m.stream);
    floatX* qkv_in = column_input(m, s.qkv_in);
    op::matmul_forward(s.qkv, nullptr, qkv_in, w.qkv_w, w.qkv_b, m.N, C, 3 * m.C_l, m.stream);
    op::attention_forward(s.att, s.lse, s.qkv, m.B, m.T, m.NH_l, m.NH_l, m.HS, m.stream);
    op::matmul_forward(m.act.partial, nullptr, s.att, w.proj_w, nullptr, m.N, m.C_l, C, m.stream);
    partial_reduce_norm(m, attn_out_fwd, l,
                        {s.x_mid, nullptr, s.mean2, s.rstd2, s.x, w.proj_b, w.ln2_w, w.ln2_b, C, m.config.eps},
                        {mlp_in_fwd, l, s.fc_in});
    floatX* fc_in = column_input(m, s.fc_in);
    op::matmul_forward(s.gelu, s.fc, fc_in, w.fc_w, w.fc_b, m.N, C, m.F_l, m.stream);
}

// From act.ids to the last norm's output; what that norm wrote is gathered by the head.
void model_forward(Model& m) {
    const int C = m.config.channels, L = m.config.layers;
    Activations& a = m.act;
    op::embedding_forward(a.partial, a.ids, m.w.wte, m.vocab_first, m.V_l, m.N, C, m.stream);
    device_copy(a.layer[0].x, partial_reduce(m, embed_fwd, 0), m.n * C * sizeof(floatX), m.stream);
    op::position_forward(a.layer[0].x, m.w.wpe, m.first_tok, m.n, m.T, C, m.stream);
    block_norm_forward(m, 0);
    for (int l = 0; l < L; l++) {
        LayerActivations& s = a.layer[l];
        const LayerWeights<floatX>& w = m.w.layer[l];
        block_forward(m, l);
        op::matmul_forward(a.partial, nullptr, s.gelu, w.out_w, nullptr, m.N, m.F_l, C, m.stream);
        if (l + 1 < L) {
            LayerActivations& next = a.layer[l + 1];
            const LayerWeights<floatX>& wn = m.w.layer[l + 1];
            partial_reduce_norm(m, mlp_out_fwd, l,
                                {next.x, nullptr, next.mean1, next.rstd1, s.x_mid, w.out_b, wn.ln1_w, wn.ln1_b, C, m.config.eps},
                                {attn_in_fwd, l + 1, next.qkv_in});
        } else {
            partial_reduce_norm(m, mlp_out_fwd, l,
                                {a.x_out, nullptr, a.meanf, a.rstdf, s.x_mid, w.out_b, m.w.lnf_w, m.w.lnf_b, C, m.config.eps},
                                {head_fwd, 0, a.head_in});
        }
    }
}

// Logits and losses of all tokens, a chunk at a time. With scale > 0 also the head's backward: dlogits replace the
// logits, the weight's gradient is added up, and act.partial [N, C] becomes this rank's summand of the input's gradient.
void head_forward_backward(Model& m, float scale, bool accumulate) {
    const int C = m.config.channels, tp = m.tp->size;
    Activations& a = m.act;
    SpanScope span(m.boundaries.spans, "head", "compute", m.stream);
    floatX* inp = column_input(m, a.head_in);
    for (long at = 0; at < m.N; at += m.head_chunk) {
        const long count = std::min<long>(m.head_chunk, m.N - at);
        op::matmul_forward(a.logits, nullptr, inp + at * C, m.w.head, nullptr, count, C, m.V_l, m.stream);
        op::classifier_local(a.stats + m.tp->rank * count * 3, a.logits, a.targets + at, m.vocab_first, m.vocab_valid, m.V_l,
                             count, m.stream);
        TensorRequest request = tensor_all_gather_begin(*m.tp, a.stats, count * 3 * sizeof(float), "softmax statistics", m.stream);
        request_finish(*m.tp, request, m.stream);
        op::classifier_finish(a.losses + at, a.logits, a.stats, a.targets + at, m.vocab_first, m.vocab_valid, m.V_l, tp, scale,
                              count, m.stream);
        if (scale == 0.0f) continue;
        op::matmul_backward_weight(m.g.head, nullptr, a.logits, inp + at * C, count, C, m.V_l, accumulate || at > 0, m.stream);
        op::matmul_backward_input(a.partial + at * C, a.logits, m.w.head, nullptr, count, C, m.V_l, m.stream);
    }
}

// Sum of the losses of this batch; tokens with target -1 count nothing.
double losses_sum(const Model& m) {
    std::vector<float> losses(m.N);
    device_download(losses.data(), m.act.losses, m.N * sizeof(float), m.stream);
    double sum = 0;
    for (float loss : losses) sum += loss;
    return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// Gradients are summed over dp as they become final: a block's cut matrices while the blocks below it are still in backward,
// the rest at the end. The loss's scale already holds the average.
struct GradientSums {
    Comm* dp;
    std::vector<TensorRequest> requests;
};

void gradients_sum_begin(Model& m, GradientSums& sums, float* first, const float* end) {
    if (sums.dp->size == 1) return;
    sums.requests.push_back(
        tensor_all_reduce_sum_begin(*sums.dp, first, end - first, "sum of gradients", m.stream));
}

// The matrices of block l that are cut over tp: they lie side by side.
void block_gradients_sum_begin(Model& m, GradientSums& sums, int l) {
    const bool last = l + 1 == m.config.layers;
    const float* end = !last ? m.g.layer[l + 1].qkv_w : m.config.tied ? m.grads + m.table.local_size : m.g.head;
    gradients_sum_begin(m, sums, m.g.layer[l].qkv_w, end);
}

// What blocks do not sum: replicated parameters, over tp as well (under sequence parallelism each rank has seen a stripe of
// the tokens), embedding and head. Waits for all.
void gradients_sum_finish(Model& m, GradientSums& sums) {
    if (m.gathers) {
        TensorRequest request = tensor_all_reduce_sum_begin(*m.tp, m.grads, m.table.replicated, "sum of gradients", m.stream);
        request_finish(*m.tp, request, m.stream);
    }
    gradients_sum_begin(m, sums, m.grads, m.g.layer[0].qkv_w);  // replicated, then wte
    if (!m.config.tied) gradients_sum_begin(m, sums, m.g.head, m.grads + m.table.local_size);
    for (TensorRequest& request : sums.requests) request_finish(*sums.dp, request, m.stream);
    sums.requests.clear();
}

void block_backward(Model& m, int l, bool accumulate) {
    const int C = m.config.channels;
    Activations& a = m.act;
    LayerActivations& s = a.layer[l];
    const LayerWeights<floatX>& w = m.w.layer[l];
    const LayerWeights<float>& g = m.g.layer[l];
    SpanScope span(m.boundaries.spans, "block_backward", "compute", m.stream);
    if (m.recompute == Recompute::gelu) op::gelu_forward(s.gelu, s.fc, size_t(m.N) * m.F_l, m.stream);
    if (m.recompute == Recompute::block) {
        block_norm_forward(m, l);
        block_forward(m, l);
    }

    op::bias_backward(g.out_b, a.dx, m.n, C, accumulate, m.stream);
    floatX* dout = row_output_gradient(m, mlp_out_bwd, l);
    op::matmul_backward_weight(g.out_w, nullptr, dout, s.gelu, m.N, m.F_l, C, accumulate, m.stream);
    op::matmul_backward_input(a.dfc, dout, w.out_w, s.fc, m.N, m.F_l, C, m.stream);
    floatX* fc_in = column_input_again(m, mlp_in_fwd, s.fc_in);
    op::matmul_backward_weight(g.fc_w, g.fc_b, a.dfc, fc_in, m.N, C, m.F_l, accumulate, m.stream);
    op::matmul_backward_input(a.partial, a.dfc, w.fc_w, nullptr, m.N, C, m.F_l, m.stream);
    floatX* dnorm2 = partial_reduce(m, mlp_in_bwd, l);
    op::layernorm_backward(a.dx, g.ln2_w, g.ln2_b, dnorm2, s.x_mid, w.ln2_w, s.mean2, s.rstd2, m.n, C, accumulate, m.stream);

    op::bias_backward(g.proj_b, a.dx, m.n, C, accumulate, m.stream);
    dout = row_output_gradient(m, attn_out_bwd, l);
    op::matmul_backward_weight(g.proj_w, nullptr, dout, s.att, m.N, m.C_l, C, accumulate, m.stream);
    op::matmul_backward_input(a.datt, dout, w.proj_w, nullptr, m.N, m.C_l, C, m.stream);
    op::attention_backward(a.dqkv, a.datt, s.att, s.lse, s.qkv, m.B, m.T, m.NH_l, m.NH_l, m.HS, m.stream);
    floatX* qkv_in = column_input_again(m, attn_in_fwd, s.qkv_in);
    op::matmul_backward_weight(g.qkv_w, g.qkv_b, a.dqkv, qkv_in, m.N, C, 3 * m.C_l, accumulate, m.stream);
    op::matmul_backward_input(a.partial, a.dqkv, w.qkv_w, nullptr, m.N, C, 3 * m.C_l, m.stream);
    floatX* dnorm1 = partial_reduce(m, attn_in_bwd, l);
    op::layernorm_backward(a.dx, g.ln1_w, g.ln1_b, dnorm1, s.x, w.ln1_w, s.mean1, s.rstd1, m.n, C, accumulate, m.stream);
}

// Forward and backward of one micro-batch whose ids and targets are set. Gradients are of scale x (sum of losses), and
// overwrite what was there unless `accumulate`. With `sums`, of the last micro-batch, their summation is begun on the way.
// Returns the sum of the losses.
double model_forward_backward(Model& m, float scale, bool accumulate, GradientSums* sums) {
    const int C = m.config.channels;
    Activations& a = m.act;
    model_forward(m);
    head_forward_backward(m, scale, accumulate);
    floatX* dnorm = partial_reduce(m, head_bwd, 0);
    device_zero(a.dx, m.n * C * sizeof(floatX), m.stream);
    op::layernorm_backward(a.dx, m.g.lnf_w, m.g.lnf_b, dnorm, a.x_out, m.w.lnf_w, a.meanf, a.rstdf, m.n, C, accumulate, m.stream);
    for (int l = m.config.layers - 1; l >= 0; l--) {
        block_backward(m, l, accumulate);
        if (sums) block_gradients_sum_begin(m, *sums, l);
    }
    op::position_backward(m.g.wpe, a.dx, m.first_tok, m.n, m.T, C, m.config.positions, accumulate, m.stream);
    if (!m.config.tied && !accumulate) device_zero(m.g.wte, size_t(m.V_l) * C * sizeof(float), m.stream);
    floatX* dembed = row_output_gradient(m, embed_bwd, 0);
    op::embedding_backward(m.g.wte, dembed, a.ids, m.vocab_first, m.V_l, m.N, C, m.stream);
    return losses_sum(m);
}

// ---------------------------------------------------------------------------------------------------------------------
// Update

// The norm of the whole model's gradient, each parameter counted once; the same bits on every rank.
double gradients_norm(Model& m) {
    const size_t replicated = m.table.replicated;
    const double shared = op::global_norm_squared(m.grads, replicated, m.stream);
    const double sharded = op::global_norm_squared(m.grads + replicated, m.table.local_size - replicated, m.stream);
    return std::sqrt(shared + all_reduce_sum(*m.tp, sharded));
}

// One AdamW step, `step` counted from 1; gradients are scaled by grad_scale on the way. Returns nothing: params, m, v.
void model_update(Model& m, const AdamW& hyper) {
    for (const Param& p : m.table.list) {
        AdamW own = hyper;
        if (!p.decay) own.weight_decay = 0.0f;
        own.seed = hyper.seed ^ hash_name(p.name);
        op::adamw_update(m.params + p.offset, m.master ? m.master + p.offset : nullptr, m.grads + p.offset, m.adam_m + p.offset,
                         m.adam_v + p.offset, p.local_size(), own, m.stream);
    }
}

// Replicated parameters must be the same bits over tp, and all parameters over dp: digests are compared. Collective; throws
// on all ranks if any finds a difference.
void replicas_check(Model& m, Mesh& mesh) {
    auto digest = [&](size_t count) {  // a multiple of 16: pieces are aligned to 64 bytes
        const size_t bytes = count * sizeof(floatX);
        std::vector<uint64_t> copy(device_is_host ? 0 : bytes / 8);
        if (!device_is_host) device_download(copy.data(), m.params, bytes, m.stream);
        const uint64_t* words = device_is_host ? reinterpret_cast<const uint64_t*>(m.params) : copy.data();
        uint64_t hash = 0xcbf29ce484222325u;
        for (size_t i = 0; i < bytes / 8; i++) hash = (hash ^ words[i]) * 0x100000001b3u;
        return hash;
    };
    for (auto [comm, count, what] :
         {std::tuple(&mesh.tp, m.table.replicated, "replicated parameters"), {&mesh.dp, m.table.local_size, "parameters"}}) {
        if (comm->size == 1) continue;
        const std::vector<uint64_t> all = gather_values(*comm, digest(count), "replica check");
        together(mesh.world, [&] {
            for (int r = 0; r < comm->size; r++) {
                check(all[r] == all[0],
                      "%s differ between %s ranks 0 and %d: they must be the same bits. Restart from the last checkpoint", what,
                      comm->axis, r);
            }
        });
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Data, validation, samples

// Windows of T + 1 tokens, [B, T + 1], become ids and targets.
void batch_set(Model& m, const std::vector<int>& windows) {
    std::vector<int> ids(m.N), targets(m.N);
    for (long b = 0; b < m.B; b++) {
        std::copy_n(&windows[b * (m.T + 1)], m.T, &ids[b * m.T]);
        std::copy_n(&windows[b * (m.T + 1) + 1], m.T, &targets[b * m.T]);
    }
    device_upload(m.act.ids, ids.data(), m.N * sizeof(int), m.stream);
    device_upload(m.act.targets, targets.data(), m.N * sizeof(int), m.stream);
}

// Mean loss over the first `batches` x B windows of the validation set in order (0: over all of it), shared out over dp.
double validate(Model& m, Mesh& mesh, const TokenSet& val, int batches) {
    const size_t available = tokens_val_windows(val, m.T);
    const size_t windows = batches ? std::min(available, size_t(batches) * m.B) : available;
    double sum = 0;
    for (size_t first = 0; first < windows; first += size_t(m.B) * mesh.dp.size) {
        std::vector<int> tokens(size_t(m.B) * (m.T + 1), -1);  // places without a window: no embedding, no loss
        together(mesh.world, [&] {
            for (int b = 0; b < m.B; b++) {
                const size_t window = first + size_t(mesh.dp.rank) * m.B + b;
                if (window < windows) tokens_val_window(val, window, m.T, m.config.vocab, &tokens[b * (m.T + 1)]);
            }
        });
        batch_set(m, tokens);
        model_forward(m);
        head_forward_backward(m, 0.0f, false);
        sum += losses_sum(m);
    }
    return all_reduce_sum(mesh.dp, sum) / (double(windows) * m.T);
}

// Continues `tokens` by `count` tokens with ids below `vocab`. The whole context is run again for each token, as there is no
// cache of keys and values; every rank draws the same number and picks the same token.
void sample(Model& m, std::vector<int>& tokens, int count, int vocab, float temperature, int top_k, uint64_t key) {
    const int C = m.config.channels, tp = m.tp->size, B = m.B, T = m.T;
    std::vector<floatX> own(m.V_l);
    std::vector<float> logits(size_t(tp) * m.V_l);
    const long context = T / tp * tp;  // forward needs a multiple of tp tokens; causality hides the padding from the rest
    for (int i = 0; i < count; i++) {
        const long length = std::min<long>(tokens.size(), context);
        model_set_batch(m, 1, int((length + tp - 1) / tp * tp));
        std::vector<int> ids(m.N, 0);
        std::copy(tokens.end() - length, tokens.end(), ids.begin());
        device_upload(m.act.ids, ids.data(), m.N * sizeof(int), m.stream);
        model_forward(m);
        const floatX* last = column_input(m, m.act.head_in) + (length - 1) * C;
        op::matmul_forward(m.act.logits, nullptr, last, m.w.head, nullptr, 1, C, m.V_l, m.stream);
        device_download(own.data(), m.act.logits, m.V_l * sizeof(floatX), m.stream);
        std::transform(own.begin(), own.end(), &logits[size_t(m.tp->rank) * m.V_l], [](floatX x) { return float(x); });
        Request request = all_gather_begin(*m.tp, logits.data(), m.V_l * sizeof(float));
        request_finish(*m.tp, request, "logits of a sample");
        together(*m.tp, [&] {
            const double uniform = uniform_from_bits(philox(key, i, 0)[0]);
            tokens.push_back(sample_token(logits.data(), vocab, temperature, top_k, uniform));
        });
    }
    model_set_batch(m, B, T);
}

// ---------------------------------------------------------------------------------------------------------------------
// The run

// What a checkpoint remembers beside tensors.
struct TrainerState {
    long step = 0;           // finished steps
    uint64_t sequences = 0;  // seen so far: the data position
    double best_val = INFINITY;
};

nlohmann::json state_to_json(const TrainerState& state, const RunConfig& run) {
    nlohmann::json json = {{"format_version", 1}, {"step", state.step}, {"sequences", state.sequences}};
    json["tokens"] = state.sequences * uint64_t(run.seq);
    json["best_val_loss"] = std::isfinite(state.best_val) ? nlohmann::json(state.best_val) : nlohmann::json();
    json["run"] = run_config_json(run);
    return json;
}

TrainerState state_from_json(const nlohmann::json& json, const std::string& path) {
    try {
        check(json.at("format_version") == 1, "'%s': format_version is %s, this version reads 1", path.c_str(),
              json["format_version"].dump().c_str());
        TrainerState state{json.at("step"), json.at("sequences"), INFINITY};
        if (json.contains("best_val_loss") && !json["best_val_loss"].is_null()) state.best_val = json["best_val_loss"];
        return state;
    } catch (const nlohmann::json::exception& e) {
        fail("'%s' is not a trainer state: %s", path.c_str(), e.what());
    }
}

// All that a run works with.
struct Run {
    RunConfig config;
    Mesh mesh;
    Model model;
    TokenSet train, val;
    std::string tokenizer_path;  // empty: none
    Tokenizer tokenizer;
    TrainerState state;
    RunLog log;
    Trace trace;
    Peak peak{};  // of all ranks
};

// SIGTERM and SIGUSR1 ask for a checkpoint and a clean end after the step in work.
volatile std::sig_atomic_t stop_requested = 0;

// The model's sizes from --model, or from the checkpoint that is resumed; V and T from the data where they are open.
ModelConfig run_model_config(const Run& run, const std::string& checkpoint) {
    namespace fs = std::filesystem;
    const std::string& model = run.config.model;
    std::string json_path;
    if (!checkpoint.empty()) {
        json_path = checkpoint + "/config.json";
    } else if (fs::is_directory(model)) {
        json_path = model + "/config.json";
    } else if (model.ends_with(".json")) {
        json_path = model;
    }
    ModelConfig config =
        json_path.empty() ? model_config_from_spec(model) : model_config_from_json(json_read(json_path), json_path);
    if (!config.positions) config.positions = run.config.seq;
    const bool has_tokenizer = !run.tokenizer_path.empty();
    // llm.c's data sets come without a tokenizer: uint16 is GPT-2's, uint32 Llama 3's
    if (!config.vocab)
        config.vocab = has_tokenizer ? tokenizer_vocab(run.tokenizer) : run.train.shards[0].width == 2 ? 50257 : 128256;
    check(!has_tokenizer || tokenizer_vocab(run.tokenizer) <= config.vocab,
          "the tokenizer '%s' has %d tokens, the model's vocabulary %d: use the tokenizer that belongs to the model",
          run.tokenizer_path.c_str(), tokenizer_vocab(run.tokenizer), config.vocab);
    return config;
}

void plan_print(const Run& run) {
    const Model& m = run.model;
    const ModelConfig& c = m.config;
    printf("model: GPT-2, %d layers, %d channels, %d heads, vocabulary %d (%ld with padding), %d positions: %s parameters\n",
           c.layers, c.channels, c.heads, c.vocab, long(m.V_l) * m.tp->size, c.positions,
           count_text(double(m.table.full_size)).c_str());
    printf("layout: %d ranks = dp %d x tp %d%s, %d threads each; %d sequences of %d tokens a step, %d at a time\n",
           run.mesh.world.size, run.mesh.dp.size, m.tp->size, m.gathers ? " with sequence parallelism" : "", run.config.threads,
           run.config.global_batch, m.T, m.B);
    printf("data: %s tokens to train on, %s to validate on; tokenizer %s\n", count_text(double(run.train.tokens)).c_str(),
           count_text(double(run.val.tokens)).c_str(),
           run.tokenizer_path.empty() ? "none, samples are ids" : run.tokenizer_path.c_str());
    std::string pieces;
    for (const auto& [label, bytes] : m.arena.plan) {
        pieces += (pieces.empty() ? "" : ", ") + label + format_text(" %.1f", double(bytes) / (1 << 20));
    }
    printf("memory of a rank: %.1f MiB (%s)\n", double(m.arena.size) / (1 << 20), pieces.c_str());
    printf("peak of all ranks: %.1f GFLOP/s (%s); its share is (6 (parameters - positions C) + 12 L C T) tokens/s / peak\n",
           run.peak.gflops, run.peak.what.c_str());
    fflush(stdout);
}

// What samples begin with. Without a tokenizer that is GPT-2's end of text, the vocabulary's last token.
std::vector<int> prompt_tokens(const Run& run) {
    const RunConfig& c = run.config;
    check(c.seq >= c.tp, "samples need --seq %d to be at least --tp %d", c.seq, c.tp);
    if (run.tokenizer_path.empty()) return {run.model.config.vocab - 1};
    check(!c.prompt.empty(), "--prompt is empty: samples need at least one character to begin with");
    return tokenizer_encode(run.tokenizer, c.prompt);
}

// Everything that can be wrong is found here, before step 0, and told once.
void run_setup(Run& run) {
    namespace fs = std::filesystem;
    const RunConfig& c = run.config;
    Comm& world = run.mesh.world;
    Model& m = run.model;
    std::string checkpoint;
    ModelConfig config;
    const int rank_on_host = comm_rank_on_host(world);
    together(world, [&] {
        omp_set_num_threads(c.threads);
        m.device = device_open(rank_on_host % device_count());
        m.stream = stream_make(m.device);
    });
    const Transport transport = transport_choose(world, c.comm);
    for (Comm* comm : {&run.mesh.tp, &run.mesh.dp}) comm_tensors_open(*comm, m.device, transport);
    together(world, [&] {
        m.master_weights = c.master_weights;
        run.train = tokens_open(c.train, c.seq);
        if (!c.val.empty()) run.val = tokens_open(c.val, c.seq);
        run.tokenizer_path = c.tokenizer.empty() ? tokens_tokenizer_path(run.train) : c.tokenizer;
        if (!run.tokenizer_path.empty()) run.tokenizer = tokenizer_load(run.tokenizer_path);
        if (!c.resume.empty()) checkpoint = checkpoint_resolve(c.resume);
        config = run_model_config(run, checkpoint);
        boundaries_configure(m.boundaries, c.tp_codec, c.codec, size_t(c.codec_threshold), c.codec_warmup);
        boundaries_open(m.boundaries, run.mesh.tp, m.device);
        m.boundaries.seed = c.seed;
        const Recompute recompute = c.recompute == "block"  ? Recompute::block
                                    : c.recompute == "gelu" ? Recompute::gelu
                                                            : Recompute::none;
        model_make(m, config, run.mesh.tp, c.sp, recompute, c.micro_batch, c.seq);
        if (c.sample_every > 0) prompt_tokens(run);
        if (c.check_data) {
            tokens_check_all(run.train, config.vocab);
            tokens_check_all(run.val, config.vocab);
        }
        HostState host = host_state_make(m);
        const TrainedTensors tensors{config, m.table, host.params, host.adam_m, host.adam_v};
        if (!checkpoint.empty()) {
            run.state = state_from_json(json_read(checkpoint + "/trainer_state.json"), checkpoint + "/trainer_state.json");
            checkpoint_load(checkpoint, tensors);
        } else if (fs::is_directory(c.model)) {
            checkpoint_load(c.model, {config, m.table, host.params, nullptr, nullptr});
        } else {
            params_init(m.table, host.params, c.seed);
        }
        host_state_write(m, host);
    });
    together(world, [&] {
        if (world.rank != 0) return;
        if (!c.out.empty()) {
            std::error_code error;
            fs::create_directories(c.out, error);
            check(!error && access(c.out.c_str(), W_OK) == 0, "--out '%s' cannot be written to: %s", c.out.c_str(),
                  error ? error.message().c_str() : strerror(errno));
            check(!c.resume.empty() || fs::is_empty(c.out),
                  "--out '%s' is not empty: give --resume to go on from its latest checkpoint, or another directory",
                  c.out.c_str());
        }
        nlohmann::json record = run_record(run_config_json(c), world.size, run.mesh.dp.size);
        record["model"] = model_config_to_json(config);
        record["parameters"] = m.table.full_size;
        if (!c.trace.empty()) trace_write(c.trace, {});  // an empty one, so that a path that cannot be written is known now
        run.log = run_log_open(c.log, record, checkpoint.empty() ? -1 : run.state.step);
    });
    run.peak = peak_find(m.device, int(m.N), 3 * m.C_l, config.channels);
    run.peak.gflops = all_reduce_max(world, run.peak.gflops) * world.size;
    if (world.rank == 0) {
        plan_print(run);
        if (!checkpoint.empty()) printf("resumed from %s\n", checkpoint.c_str());
    }
    barrier(world);  // the timelines of all ranks begin together
    run.trace = trace_make(world.rank);
    if (!c.trace.empty()) m.boundaries.spans.trace = &run.trace;
}

// One optimizer step over global_batch sequences. Throws, on all ranks, before anything is changed if the loss or the
// gradient is not finite.
StepRecord train_step(Run& run) {
    Model& m = run.model;
    const RunConfig& c = run.config;
    Mesh& mesh = run.mesh;
    const int dp = mesh.dp.size, accumulation = c.global_batch / (c.micro_batch * dp);
    const double tokens = double(c.global_batch) * m.T, begin = seconds_now();
    const long step = run.state.step;
    StepRecord record;
    record.step = step + 1;
    record.lr = learning_rate(schedule_parse(c.schedule), step, c.lr, c.min_lr, c.warmup, c.lr_decay_steps);

    std::vector<std::vector<int>> batches(accumulation, std::vector<int>(size_t(m.B) * (m.T + 1)));
    together(mesh.world, [&] {
        for (int i = 0; i < accumulation; i++) {
            for (int b = 0; b < m.B; b++) {
                const uint64_t sequence = run.state.sequences + (uint64_t(i) * dp + mesh.dp.rank) * m.B + b;
                tokens_train_window(run.train, c.seed, sequence, m.T, m.config.vocab, &batches[i][b * (m.T + 1)]);
            }
        }
    });
    boundaries_records_take(m.boundaries, m.stream);  // what validation and samples sent is not the step's
    m.boundaries.step = uint32_t(step);
    m.boundaries.sample_snr = c.snr_every > 0 && step % c.snr_every == 0;
    // in fp16 a mean's gradients would fall below the smallest number: there they are a sum's until AdamW
    const double loss_scale = floatX_is_fp16 ? tokens : 1.0;
    GradientSums sums{&mesh.dp, {}};
    double loss = 0;
    for (int i = 0; i < accumulation; i++) {
        m.boundaries.micro_batch = uint32_t(i * dp + mesh.dp.rank);
        batch_set(m, batches[i]);
        loss += model_forward_backward(m, float(loss_scale / tokens), i > 0, i + 1 == accumulation ? &sums : nullptr);
    }
    m.boundaries.sample_snr = false;
    const double reduce_begin = seconds_now();
    gradients_sum_finish(m, sums);
    record.loss = all_reduce_sum(mesh.dp, loss) / tokens;
    record.norm = gradients_norm(m) / loss_scale;
    const double reduce_s = seconds_now() - reduce_begin;
    if (!std::isfinite(record.loss) || !std::isfinite(record.norm)) {
        throw AgreedError(
            format_text("step %ld: the loss is %g and the gradient norm %g. Stopped with nothing changed since the last "
                        "checkpoint; lower --lr, raise --warmup, or look at the boundaries' codecs",
                        record.step, record.loss, record.norm));
    }
    AdamW hyper{};
    hyper.lr = float(record.lr);
    hyper.beta1 = c.beta1;
    hyper.beta2 = c.beta2;
    hyper.eps = c.eps;
    hyper.weight_decay = c.weight_decay;
    hyper.grad_scale = float((c.clip > 0 && record.norm > c.clip ? c.clip / record.norm : 1.0) / loss_scale);
    hyper.step = step + 1;
    hyper.seed = c.seed;
    model_update(m, hyper);
    run.state.step++;
    run.state.sequences += c.global_batch;
    stream_synchronize(m.stream);
    if (c.check_replicas > 0 && run.state.step % c.check_replicas == 0) replicas_check(m, mesh);

    const double seconds = seconds_now() - begin;
    const double flops_token = 6.0 * double(m.table.full_size - size_t(m.config.positions) * m.config.channels) +
                               12.0 * m.config.layers * m.config.channels * m.T;
    record.ms = 1e3 * seconds;
    record.tokens_per_s = tokens / seconds;
    record.gflops = flops_token * record.tokens_per_s / 1e9;
    record.mfu = record.gflops / run.peak.gflops;
    record.boundaries = boundaries_records_take(m.boundaries, m.stream);
    double comm_ms = 1e3 * reduce_s;
    for (const BoundaryRecord& b : record.boundaries) {
        record.wire_bytes += b.wire_bytes;
        record.raw_bytes += b.raw_bytes;
        comm_ms += b.encode_ms + b.wire_ms + b.decode_ms;
    }
    record.comm_share = comm_ms / record.ms;
    return record;
}

void run_validate(Run& run) {
    const double begin = seconds_now();
    const double loss = validate(run.model, run.mesh, run.val, int(run.config.val_batches));
    run.state.best_val = std::min(run.state.best_val, loss);
    if (run.mesh.world.rank != 0) return;
    printf("step %ld: validation loss %.4f, best %.4f (%s)\n", run.state.step, loss, run.state.best_val,
           duration_text(seconds_now() - begin).c_str());
    fflush(stdout);
    run_log_validation(run.log, run.state.step, loss);
}

void run_sample(Run& run) {
    Model& m = run.model;
    const RunConfig& c = run.config;
    std::vector<int> tokens = prompt_tokens(run);
    const bool text = !run.tokenizer_path.empty();  // then tokens beyond the tokenizer's, a model's padding, are not drawn
    sample(m, tokens, c.sample_tokens, text ? tokenizer_vocab(run.tokenizer) : m.config.vocab, c.temperature, c.top_k,
           c.seed ^ hash_name("sample") ^ uint64_t(run.state.step));
    if (run.mesh.world.rank != 0) return;
    std::string out;
    if (text) {
        out = tokenizer_decode(run.tokenizer, tokens.data(), tokens.size());
    } else {
        for (int token : tokens) out += std::to_string(token) + " ";
    }
    printf("--- sample after step %ld ---\n%s\n---\n", run.state.step, out.c_str());
    fflush(stdout);
    run_log_sample(run.log, run.state.step, c.prompt, out);
}

void run_save(Run& run) {
    Model& m = run.model;
    const double begin = seconds_now();
    HostState host = host_state_make(m);
    host_state_read(host, m);
    checkpoint_save(run.config.out, run.state.step, run.mesh, {m.config, m.table, host.params, host.adam_m, host.adam_v},
                    state_to_json(run.state, run.config), run.tokenizer_path, run.config.keep);
    if (run.mesh.world.rank == 0) {
        printf("step %ld: saved to %s (%s)\n", run.state.step, run.config.out.c_str(),
               duration_text(seconds_now() - begin).c_str());
        fflush(stdout);
    }
}

void run_trace_write(Run& run) {
    Comm& world = run.mesh.world;
    const std::string own = trace_bytes(run.trace);
    std::vector<std::string> ranks = gather_text(world, own);
    together(world, [&] {
        if (world.rank == 0) trace_write(run.config.trace, ranks);
    });
}

void run_train(Run& run) {
    const RunConfig& c = run.config;
    Comm& world = run.mesh.world;
    TrainerState& state = run.state;
    const bool first = world.rank == 0;
    const long first_step = state.step;
    const double begin = seconds_now();
    std::vector<BoundaryRecord> totals;
    bool stop = false;
    while (state.step < c.stop_step && !stop) {
        const StepRecord record = train_step(run);
        boundary_records_add(totals, record.boundaries);
        stop = all_reduce_max(world, double(stop_requested)) > 0;
        const bool last = stop || state.step == c.stop_step;
        auto due = [&](long every) { return every > 0 && (last || state.step % every == 0); };
        together(world, [&] {
            if (!first) return;
            if (last || state.step == first_step + 1 || state.step % c.print_every == 0) {
                printf("%s\n", step_text(record, c.steps).c_str());
                fflush(stdout);
            }
            run_log_step(run.log, record);
        });
        if (!c.val.empty() && due(c.val_every) && !stop) run_validate(run);
        if (due(c.sample_every) && !stop) run_sample(run);
        if (!c.out.empty() && (last || due(c.save_every))) run_save(run);
    }
    if (!c.trace.empty()) run_trace_write(run);
    if (!first) return;
    if (stop) printf("stopped by a signal after step %ld\n", state.step);
    printf("%s", boundary_table(totals, state.step - first_step).c_str());
    printf("done: %ld steps in %s, peak memory of a rank %.1f MiB\n", state.step - first_step,
           duration_text(seconds_now() - begin).c_str(), peak_memory_mib());
}

#ifndef TRAIN_GPT_NO_MAIN
int main(int argc, char** argv) {
    comm_init(&argc, &argv);
    int status = 0;
    int rank = 0;
    try {
        Run run;
        Comm world = comm_world();
        rank = world.rank;
        Command command;
        const int ranks_on_host = comm_ranks_on_host(world);
        together(world, [&] {
            command = run_config_parse(argc, argv);
            if (command.action != Command::help) run_config_resolve(command.config, world.size, ranks_on_host);
        });
        if (command.action == Command::help) {
            if (rank == 0) fputs(run_config_help().c_str(), stdout);
        } else if (command.action == Command::print_config) {
            if (rank == 0) fputs(run_config_text(command.config).c_str(), stdout);
        } else {
            run.config = command.config;
            for (int signal_number : {SIGTERM, SIGUSR1}) std::signal(signal_number, [](int) { stop_requested = 1; });
            together(world, [&] { run.mesh = mesh_make(run.config.tp, run.config.pp, run.config.comm_timeout); });
            run_setup(run);
            run_train(run);
        }
    } catch (const AgreedError& e) {  // known to all ranks: they end together
        if (rank == 0) fprintf(stderr, "train_gpt: %s\n", e.what());
        status = 1;
    } catch (const std::exception& e) {  // this rank's own: the others must not wait for it
        comm_abort(e.what());
    }
    comm_finalize();
    return status;
}
#endif
