// Streams and events. Work that is put on a stream waits in its queue until somebody waits for it: so work that is ordered by
// nothing but luck comes in the wrong order here, under one policy or another.
//
//   lazy     only what the waiter needs: other streams fall as far behind as their events allow
//   eager    when somebody waits, all other streams go first, as far as their own waits allow
//   random   the next piece of work comes from any stream whose waits allow it
//
// The null stream is one more stream: to streams made with cudaStreamNonBlocking, the only ones there are, CUDA gives it no
// order either. All CUDA calls come from the program's first thread; others may only query.
#pragma once
#include <sched.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "emu_memory.h"

struct CUstream_st;
typedef CUstream_st* cudaStream_t;

namespace emu {

// What an event has seen. Records of one event are numbered; the work of record n is done once completed >= n.
struct Record {
    std::atomic<uint64_t> recorded{0}, completed{0};
    std::atomic<double> seconds{0};  // of the last completed one
    CUstream_st* stream = nullptr;   // that the last record was put on
};

struct Work {
    std::function<bool()> run;        // null: none; false: not done yet, it is called again
    std::shared_ptr<Record> waits_for;  // null: none
    uint64_t number = 0;              // of that record
    CUstream_st* stream = nullptr;    // that that record was put on

    bool may_run() const { return !waits_for || waits_for->completed >= number; }
};

}  // namespace emu

struct CUstream_st {
    std::deque<emu::Work> queue;
    std::atomic<size_t> pending{0};  // for other threads
};

struct CUevent_st {
    std::shared_ptr<emu::Record> record = std::make_shared<emu::Record>();
};
typedef CUevent_st* cudaEvent_t;

namespace emu {

struct Streams {
    CUstream_st null_stream;
    std::vector<CUstream_st*> all{&null_stream};
    Random random;
    uint64_t random_seed = 0;           // that `random` was made from
    std::exception_ptr error;           // of work that ran where it could not be thrown
    std::thread::id thread = std::this_thread::get_id();
};

inline Streams streams;

inline void thread_check() {
    if (std::this_thread::get_id() != streams.thread)
        throw Error("emu: CUDA calls other than queries come from the program's first thread only");
}

// Null for a handle that is none.
inline CUstream_st* stream_find(cudaStream_t handle) {
    if (!handle) return &streams.null_stream;
    const auto it = std::find(streams.all.begin(), streams.all.end(), handle);
    return it == streams.all.end() ? nullptr : *it;
}

inline void work_put(CUstream_st& stream, Work work) {
    thread_check();
    stream.queue.push_back(std::move(work));
    stream.pending++;
}

// Puts `work` on a stream. It may touch device memory. For kernels, copies, and the calls of libraries. What waits for other
// processes is polled: it tries, and returns whether it is done; until then other streams go on.
inline void enqueue_poll(cudaStream_t handle, std::function<bool()> work) {
    CUstream_st* stream = stream_find(handle);
    if (!stream) throw Error("emu: work for a stream that does not exist");
    work_put(*stream, {std::move(work), nullptr, 0, nullptr});
}
inline void enqueue(cudaStream_t handle, std::function<void()> work) {
    enqueue_poll(handle, [work = std::move(work)] {
        work();
        return true;
    });
}

// After an error nothing that was queued is worth running.
inline void streams_clear() {
    for (CUstream_st* stream : streams.all) {
        stream->queue.clear();
        stream->pending = 0;
    }
}

// The first piece of work of a stream, whose waits allow it. False if it is not done yet.
inline bool work_run(CUstream_st& stream) {
    try {
        const Work& work = stream.queue.front();
        if (work.run && !work.run()) return false;
    } catch (...) {
        streams_clear();
        throw;
    }
    stream.queue.pop_front();
    stream.pending--;
    return true;
}

// The next piece of work that a stream needs, its own or another's that it waits for. False if that is not done yet.
inline bool goal_step(CUstream_st& goal) {
    const Work& next = goal.queue.front();
    return next.may_run() ? work_run(goal) : goal_step(*next.stream);
}

// Runs work, in an order that the policy chooses among the legal ones, until `reached`, which only needs `goal` to get on.
inline void streams_run(CUstream_st& goal, const std::function<bool()>& reached) {
    const DeviceAccess access;
    const Options& option = options();
    if (option.streams == StreamPolicy::random) {
        if (streams.random_seed != option.streams_seed) streams.random = Random(streams.random_seed = option.streams_seed);
        while (!reached()) {
            CUstream_st* chosen = nullptr;
            uint32_t candidates = 0;
            for (CUstream_st* stream : streams.all) {
                if (stream->queue.empty() || !stream->queue.front().may_run()) continue;
                if (streams.random.below(++candidates) == 0) chosen = stream;
            }
            if (!work_run(*chosen)) sched_yield();
        }
    }
    if (option.streams == StreamPolicy::eager) {
        for (bool moved = true; moved;) {
            moved = false;
            for (CUstream_st* stream : streams.all) {
                while (stream != &goal && !stream->queue.empty() && stream->queue.front().may_run() && work_run(*stream)) moved = true;
            }
        }
    }
    while (!reached()) {
        if (!goal_step(goal)) sched_yield();
    }
}

// What a kernel did wrong is thrown here, by the call that waits for it.
inline void error_throw() {
    if (streams.error) std::rethrow_exception(std::exchange(streams.error, nullptr));
}

inline void stream_synchronize(CUstream_st& stream) {
    thread_check();
    error_throw();
    if (stream.queue.empty()) return;
    streams_run(stream, [&] { return stream.queue.empty(); });
    guards_check_all();
}

inline void device_synchronize() {
    for (size_t i = streams.all.size(); i-- > 0;) stream_synchronize(*streams.all[i]);
    // those that went first may have got nothing new: nothing adds work meanwhile
}

// The same from where nothing can be thrown: an error waits for the next call that may.
inline bool device_synchronize_quietly() {
    try {
        device_synchronize();
        return true;
    } catch (...) {
        streams.error = std::current_exception();
        return false;
    }
}

inline void event_record(CUevent_st& event, CUstream_st& stream) {
    const std::shared_ptr<Record> record = event.record;
    const uint64_t number = ++record->recorded;
    record->stream = &stream;
    work_put(stream, {[record, number] {
                          record->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
                          record->completed = std::max(record->completed.load(), number);
                          return true;
                      },
                      nullptr, 0, nullptr});
}

inline void event_wait(CUstream_st& stream, const CUevent_st& event) {
    const uint64_t number = event.record->recorded;
    if (number) work_put(stream, {nullptr, event.record, number, event.record->stream});
}

inline bool event_done(const CUevent_st& event) { return event.record->completed >= event.record->recorded; }

inline void event_synchronize(const CUevent_st& event) {
    thread_check();
    error_throw();
    if (event_done(event)) return;
    streams_run(*event.record->stream, [&] { return event_done(event); });
    guards_check_all();
}

// For polling: one piece of work, from the first thread; another thread only looks.
inline void stream_poll(CUstream_st& stream) {
    if (std::this_thread::get_id() != streams.thread || stream.queue.empty()) return;
    int tries = 0;
    streams_run(stream, [&] { return tries++ > 0 || stream.queue.empty(); });
}

}  // namespace emu
