// Collectives on tensors in the device's memory, on streams: same names on all targets.
//
//   comm_tensors_open(tp, device, Transport::nccl);                       // once a group; collective
//   TensorRequest request = tensor_all_gather_begin(tp, slots, bytes, "name", stream);   // after what is on `stream` now
//   ...work that leaves the buffers alone...
//   request_finish(tp, request, stream);                                  // before what comes on `stream` next
//
// On GPUs the work is on a communication stream of the group's own; with NCCL the host waits for nothing. Every rank begins
// and finishes the same requests in the same order. `what`, a literal, is what messages and the watchdog call it.
// On the cpu target, and for a group of one rank, these are the exchanges of comm.h.
#pragma once
#include "llmc/comm/agree.h"
#include "llmc/device.h"

#ifndef LLMC_CUDA

struct TensorRequest {
    const char* what = "";
    size_t sent_bytes = 0;  // payload this rank handed to the transport; not counted for sums
    Event started, done;    // the time spent in it, once finished
    Request messages;
};

inline void comm_tensors_open(Comm&, Device&, Transport) {}

namespace tensors_detail {

template <class Begin>
TensorRequest request_begin(const char* what, Stream stream, Begin begin) {
    TensorRequest request;
    request.what = what;
    event_record(request.started, stream);
    request.messages = begin();
    request.sent_bytes = request.messages.sent_bytes;
    event_record(request.done, stream);
    return request;
}

}  // namespace tensors_detail

// slots [size][bytes]: the own slot is filled, the others are received.
inline TensorRequest tensor_all_gather_begin(Comm& comm, void* slots, size_t bytes, const char* what, Stream stream) {
    return tensors_detail::request_begin(what, stream, [&] { return all_gather_begin(comm, slots, bytes); });
}

// Slot p of `send` [size][bytes] goes to rank p, into its slot of this rank's number. Own slots are not touched.
inline TensorRequest tensor_all_to_all_begin(Comm& comm, void* receive, const void* send, size_t bytes, const char* what,
                                             Stream stream) {
    return tensors_detail::request_begin(what, stream, [&] { return all_to_all_begin(comm, receive, send, bytes); });
}

// x [n] becomes its sum over the ranks, the same bits on all of them.
inline TensorRequest tensor_all_reduce_sum_begin(Comm& comm, float* x, size_t n, const char* what, Stream stream) {
    return tensors_detail::request_begin(what, stream, [&] {
        all_reduce_sum(comm, x, n);
        return Request{};
    });
}

inline void request_finish(Comm& comm, TensorRequest& request, Stream stream) {
    Event waiting;
    event_record(waiting, stream);
    const double elsewhere = event_seconds(request.done, waiting);  // the caller's work since begin: not spent in it
    request_finish(comm, request.messages, request.what);
    event_record(request.done, stream);
    request.started.seconds += elsewhere;
}

#elif defined LLMC_NO_MPI

struct TensorRequest {
    size_t sent_bytes = 0;
    Event started, done;
};
inline void comm_tensors_open(Comm&, Device&, Transport) {}
inline TensorRequest tensor_all_gather_begin(Comm&, void*, size_t, const char*, Stream) { return {}; }
inline TensorRequest tensor_all_to_all_begin(Comm&, void*, const void*, size_t, const char*, Stream) { return {}; }
inline TensorRequest tensor_all_reduce_sum_begin(Comm&, float*, size_t, const char*, Stream) { return {}; }
inline void request_finish(Comm&, TensorRequest&, Stream) {}

#else
#include "llmc/comm/tensors_gpu.h"
#endif

// What `--comm auto|nccl|mpi` means here: auto is NCCL if each rank can have a GPU of its own. Collective.
inline Transport transport_choose(Comm& world, const std::string& wanted) {
#if defined LLMC_CUDA && !defined LLMC_NO_NCCL && !defined LLMC_NO_MPI
    constexpr bool has_nccl = true;
#else
    constexpr bool has_nccl = false;
#endif
    together(world,
             [&] { check(has_nccl || wanted != "nccl", "--comm nccl: this program was built without NCCL; use --comm auto"); });
    if (wanted != "auto") return wanted == "nccl" ? Transport::nccl : Transport::mpi;
    const bool shared = all_reduce_max(world, comm_ranks_on_host(world) > device_count()) > 0;
    return has_nccl && !shared ? Transport::nccl : Transport::mpi;
}
