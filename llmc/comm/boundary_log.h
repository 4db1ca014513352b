// What the boundaries count: on the host calls, bytes and times, in the device's memory what kernels find. Both are read
// and start anew once a step.
#pragma once
#include <cmath>
#include <utility>
#include <vector>

#include "llmc/boundary_names.h"
#include "llmc/codec/codec.h"
#include "llmc/device.h"
#include "llmc/log.h"

struct BoundaryCounters {
    Codec codec;                                        // of the latest call
    uint64_t calls = 0, raw_bytes = 0, wire_bytes = 0;  // sent by this rank; raw: had it been bf16
    double encode_s = 0, wire_s = 0, decode_s = 0;      // added up by spans_resolve
};

struct BoundaryDeviceCounters {
    uint64_t nonfinite;    // groups with a NaN or an infinity
    double signal, noise;  // sums of squares of the values encoded here and of their errors, where sampled
};

// Of the device's memory, for one BoundaryDeviceCounters a boundary.
constexpr size_t boundary_counters_bytes() { return boundary_count * sizeof(BoundaryDeviceCounters); }

// `codec`: the configured one, shown where there was no call.
inline BoundaryRecord boundary_record(BoundaryId id, const Codec& codec, const BoundaryCounters& host,
                                      const BoundaryDeviceCounters& device) {
    BoundaryRecord r;
    r.name = boundary_names[id];
    r.codec = codec_text(host.calls ? host.codec : codec);
    r.calls = host.calls;
    r.raw_bytes = host.raw_bytes;
    r.wire_bytes = host.wire_bytes;
    r.nonfinite = device.nonfinite;
    r.encode_ms = 1e3 * host.encode_s;
    r.wire_ms = 1e3 * host.wire_s;
    r.decode_ms = 1e3 * host.decode_s;
    if (device.signal > 0 && device.noise > 0) r.snr_db = 10 * std::log10(device.signal / device.noise);
    return r;
}
