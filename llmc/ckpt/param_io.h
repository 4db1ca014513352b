// Between a rank's piece of a parameter and the full tensor of a file: which runs of file elements are here, and the
// transposition of GPT-2's Conv1D weights ([in, out] on disk). No gather, no full copy: each rank moves its own slices.
#pragma once
#include <vector>

#include "llmc/params.h"

// The tensor's shape in a file.
inline std::vector<long> param_file_shape(const Param& p) {
    if (p.cols == 1) return {p.rows};
    return p.conv1d ? std::vector<long>{p.cols, p.rows} : std::vector<long>{p.rows, p.cols};
}

// Walks the runs of contiguous file elements that belong to this rank, some megabytes at a time, calling
// `transfer(first file element, buffer, count)` for each.
template <bool to_file, class Local, class Transfer>
void param_transfer(const Param& p, const ParamTable& table, Local* local, Transfer transfer) {
    const long line_size = p.conv1d ? p.rows : p.cols, batch_elements = 1 << 20;
    std::vector<float> buffer;
    for (const ParamBlock& b : param_blocks(p, table.tp, table.tp_rank)) {
        // the block in the file's orientation: lines of `count` elements that start at element `begin` of a line
        const long first_line = p.conv1d ? b.global_col : b.global_row, lines = p.conv1d ? b.cols : b.rows;
        const long begin = p.conv1d ? b.global_row : b.global_col, count = p.conv1d ? b.rows : b.cols;
        const long step = std::max(1L, batch_elements / count);
        for (long line = 0; line < lines; line += step) {
            const long batch = std::min(step, lines - line);
            buffer.resize(batch * count);
            auto move_local = [&] {
#pragma omp parallel for
                for (long i = 0; i < batch; i++) {
                    for (long j = 0; j < count; j++) {
                        const long row = b.local_row + (p.conv1d ? j : line + i), col = p.conv1d ? line + i : j;
                        if constexpr (to_file) {
                            buffer[i * count + j] = local[row * p.local_cols + col];
                        } else {
                            local[row * p.local_cols + col] = buffer[i * count + j];
                        }
                    }
                }
            };
            if (to_file) move_local();
            if (count == line_size) {
                transfer(size_t(first_line + line) * line_size, buffer.data(), size_t(batch * count));
            } else {
                for (long i = 0; i < batch; i++) {
                    transfer(size_t(first_line + line + i) * line_size + begin, buffer.data() + i * count, size_t(count));
                }
            }
            if (!to_file) move_local();
        }
    }
}

// write(first element, const float*, count) for each run of this rank's piece.
template <class Write>
void param_write(const Param& p, const ParamTable& table, const float* local, Write write) {
    param_transfer<true>(p, table, local, write);
}

// read(first element, float*, count) fills each run of this rank's piece; padding is left alone.
template <class Read>
void param_read(const Param& p, const ParamTable& table, float* local, Read read) {
    param_transfer<false>(p, table, local, read);
}
