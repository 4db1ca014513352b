// Collectives on tensors in a GPU's memory (tensors.h), by NCCL or staged through the host, as Comm::transport says.
#pragma once
#include "llmc/comm/staged.h"
#include "llmc/comm/watchdog.h"
#ifndef LLMC_NO_NCCL
#include "llmc/comm/nccl.h"
#endif

// What a group needs for its tensors.
struct TensorLink {
    Stream stream;  // of communication
    EventPool events;
    PinnedPool pinned;
#ifndef LLMC_NO_NCCL
    NcclComm nccl;
#endif
    Watchdog watchdog;  // last: its thread ends before what it looks at
};

struct TensorRequest {
    const char* what = "";
    size_t sent_bytes = 0;  // payload this rank hands to the transport; not counted for sums
    Event started, done;    // on the communication stream, around the transport's work
    StagedRest rest;        // staged: what remains to be done at finish
};

// Prepares a group for tensors on this device. Collective.
inline void comm_tensors_open(Comm& comm, Device& device, Transport transport) {
    if (comm.size == 1) return;
    comm.transport = transport;
    comm.link = std::make_shared<TensorLink>();
    comm.link->stream = stream_make(device);
    if (transport == Transport::mpi) return;
#ifdef LLMC_NO_NCCL
    fail("this program was built without NCCL: use --comm mpi");
#else
    comm.link->nccl = nccl_open(comm);
    const ncclComm_t nccl = comm.link->nccl.get();
    watchdog_start(comm.link->watchdog, comm, device, [nccl] { return nccl_error(nccl); });
#endif
}

namespace tensors_detail {

// The transport's work, on the communication stream after what is on `stream`. `nccl(handle, stream)` and
// `staged(pool, stream)` put it there.
template <class Nccl, class Staged>
TensorRequest request_begin(Comm& comm, size_t sent_bytes, const char* what, Stream stream, [[maybe_unused]] Nccl nccl,
                            Staged staged) {
    check(comm.link != nullptr, "'%s' in the %s group before comm_tensors_open", what, comm.axis);
    TensorLink& link = *comm.link;
    TensorRequest request{what, sent_bytes, event_take(link.events), event_take(link.events), nullptr};
    stream_follow(link.events, link.stream, stream);
    event_record(request.started, link.stream);
    if (comm.transport == Transport::mpi) {
        request.rest = staged(link.pinned, link.stream);
        return request;
    }
#ifndef LLMC_NO_NCCL
    nccl(link.nccl.get(), link.stream);
    event_record(request.done, link.stream);
    watchdog_add(link.watchdog, {++comm.sequence, what, comm.timeout_s, request.started, request.done});
#endif
    return request;
}

}  // namespace tensors_detail

inline TensorRequest tensor_all_gather_begin(Comm& comm, void* slots, size_t bytes, const char* what, Stream stream) {
    if (comm.size == 1) return {};
    char* base = static_cast<char*>(slots);
    return tensors_detail::request_begin(
        comm, (comm.size - 1) * bytes, what, stream, [&](auto nccl, Stream on) { nccl_all_gather(nccl, comm, base, bytes, on); },
        [&](PinnedPool& pool, Stream on) { return staged_all_gather(pool, comm, base, bytes, on); });
}

inline TensorRequest tensor_all_to_all_begin(Comm& comm, void* receive, const void* send, size_t bytes, const char* what,
                                             Stream stream) {
    if (comm.size == 1) return {};
    char* to = static_cast<char*>(receive);
    const char* from = static_cast<const char*>(send);
    return tensors_detail::request_begin(
        comm, (comm.size - 1) * bytes, what, stream,
        [&](auto nccl, Stream on) { nccl_all_to_all(nccl, comm, to, from, bytes, on); },
        [&](PinnedPool& pool, Stream on) { return staged_all_to_all(pool, comm, to, from, bytes, on); });
}

inline TensorRequest tensor_all_reduce_sum_begin(Comm& comm, float* x, size_t n, const char* what, Stream stream) {
    if (comm.size == 1) return {};
    return tensors_detail::request_begin(
        comm, 0, what, stream, [&](auto nccl, Stream on) { nccl_all_reduce_sum(nccl, x, n, on); },
        [&](PinnedPool& pool, Stream on) { return staged_all_reduce_sum(pool, x, n, on); });
}

inline void request_finish(Comm& comm, TensorRequest& request, Stream stream) {
    if (comm.size == 1) return;
    if (request.rest) {
        request.rest(comm, request.what);
        event_record(request.done, comm.link->stream);
        stream_synchronize(comm.link->stream);  // the pinned memory is free again
        request.rest = nullptr;
    }
    stream_wait(stream, request.done);
}
