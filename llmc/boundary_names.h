// The tensor-parallel boundaries by name: where activations (.fwd) and gradients (.bwd) cross between ranks.
#pragma once
#include <array>
#include <string>

enum BoundaryId {
    embed_fwd,
    attn_in_fwd,
    attn_out_fwd,
    mlp_in_fwd,
    mlp_out_fwd,
    head_fwd,
    embed_bwd,
    attn_in_bwd,
    attn_out_bwd,
    mlp_in_bwd,
    mlp_out_bwd,
    head_bwd,
    boundary_count
};
inline constexpr std::array<const char*, boundary_count> boundary_names = {
    "embed.fwd", "attn_in.fwd", "attn_out.fwd", "mlp_in.fwd", "mlp_out.fwd", "head.fwd",
    "embed.bwd", "attn_in.bwd", "attn_out.bwd", "mlp_in.bwd", "mlp_out.bwd", "head.bwd"};

// boundary_count if there is none of that name.
inline BoundaryId boundary_find(const std::string& name) {
    int id = 0;
    while (id < boundary_count && boundary_names[id] != name) id++;
    return BoundaryId(id);
}

// All names, for messages.
inline std::string boundaries_text() {
    std::string text;
    for (const char* name : boundary_names) {
        if (!text.empty()) text += ' ';
        text += name;
    }
    return text;
}
