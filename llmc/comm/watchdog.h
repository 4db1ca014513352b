// The watchdog of a group's collectives on GPUs: ends the run, on all ranks, when one waits too long or NCCL reports an error.
//
// The host may be stuck in a call that waits for the GPU, so this is a thread. It looks at two events of each collective in
// flight, `started` and `done`, and counts only the time between them: what is queued behind other work, or not run yet, is
// not late. When the time is over it asks the watchdogs of the other ranks how far they have come, by messages on a
// communicator of their own; who does not answer, or has not reached the collective, is missing. The lowest rank that waits
// tells. The thread ends with the struct, before MPI_Finalize.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "llmc/comm/comm.h"
#include "llmc/device.h"
#include "llmc/trace.h"

struct Watched {
    uint64_t sequence = 0;
    const char* what = "";
    double timeout_s = 0;
    Event started, done;
    double since_s = 0;  // seconds_now() when it was first seen running; 0: not yet
};

// How far a rank has come.
struct WatchAnswer {
    uint64_t reached = 0;  // the latest collective that its GPU has begun
    uint64_t waiting = 0;  // the one it is in; 0: none
};

struct Watchdog {
    static constexpr double look_s = 0.05, answers_s = 3;

    MPI_Comm talk = MPI_COMM_NULL;  // the watchdogs' own
    int rank = 0, size = 1;
    std::vector<int> world_ranks;  // of the group's
    const char* axis = "";
    int device = 0;
    std::function<std::string()> transport_error;  // empty text: none

    std::mutex mutex;  // of what follows
    std::condition_variable wake;
    std::deque<Watched> in_flight;  // in the order of the communication stream
    uint64_t reached = 0;
    bool ending = false;

    struct Message {  // stays until the end: MPI reads it when it likes
        uint64_t words[2];
        MPI_Request request;
    };
    std::deque<Message> sent;
    std::thread thread;

    Watchdog() = default;
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;
    ~Watchdog() {
        if (!thread.joinable()) return;
        {
            const std::lock_guard lock(mutex);
            ending = true;
        }
        wake.notify_all();
        thread.join();
    }
};

namespace watchdog_detail {

enum Tag { question, answer };

inline bool event_passed(const Event& event) { return cudaEventQuery(event.handle.get()) != cudaErrorNotReady; }

inline void send(Watchdog& dog, int to, Tag tag, uint64_t a, uint64_t b) {
    Watchdog::Message& message = dog.sent.emplace_back(Watchdog::Message{{a, b}, MPI_REQUEST_NULL});
    MPI_Isend(message.words, 2, MPI_UINT64_T, to, tag, dog.talk, &message.request);
}

// Takes one message of this tag if there is one: its sender, else -1.
inline int receive(Watchdog& dog, Tag tag, uint64_t (&words)[2]) {
    int there = 0;
    MPI_Status status;
    MPI_Iprobe(MPI_ANY_SOURCE, tag, dog.talk, &there, &status);
    if (!there) return -1;
    MPI_Recv(words, 2, MPI_UINT64_T, status.MPI_SOURCE, tag, dog.talk, MPI_STATUS_IGNORE);
    return status.MPI_SOURCE;
}

// Drops what is done, and returns what is running; sequence 0: nothing.
inline Watched running_look(Watchdog& dog) {
    const std::lock_guard lock(dog.mutex);
    while (!dog.in_flight.empty()) {
        Watched& front = dog.in_flight.front();
        const bool done = event_passed(front.done);
        if (!done && !event_passed(front.started)) break;
        dog.reached = front.sequence;
        if (!done) {
            if (front.since_s == 0) front.since_s = seconds_now();
            return front;
        }
        dog.in_flight.pop_front();
    }
    return {};
}

inline void questions_answer(Watchdog& dog) {
    uint64_t words[2];
    for (int from; (from = receive(dog, question, words)) >= 0;) {
        const Watched running = running_look(dog);
        send(dog, from, answer, dog.reached, running.sequence);
    }
}

inline void nap(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Who is not in the collective, as in "1, 3 (no answer)", after `answers_s` at most. Sets `other_tells` if a lower rank waits
// too.
inline std::string missing_find(Watchdog& dog, const Watched& late, bool& other_tells) {
    std::vector<std::unique_ptr<WatchAnswer>> answers(dog.size);
    answers[dog.rank] = std::make_unique<WatchAnswer>(WatchAnswer{late.sequence, late.sequence});
    for (int r = 0; r < dog.size; r++)
        if (r != dog.rank) send(dog, r, question, late.sequence, 0);
    const double begin = seconds_now();
    for (int known = 1; known < dog.size && seconds_now() - begin < Watchdog::answers_s; nap(0.01)) {
        questions_answer(dog);
        uint64_t words[2];
        for (int from; (from = receive(dog, answer, words)) >= 0; known++)
            answers[from] = std::make_unique<WatchAnswer>(WatchAnswer{words[0], words[1]});
    }
    std::string text;
    for (int r = 0; r < dog.size; r++) {
        if (answers[r] && r < dog.rank && answers[r]->waiting == late.sequence) other_tells = true;
        if (answers[r] && answers[r]->reached >= late.sequence) continue;
        text += (text.empty() ? "" : ", ") + std::to_string(dog.world_ranks[r]) + (answers[r] ? "" : " (no answer)");
    }
    return text;
}

[[noreturn]] inline void late_tell(Watchdog& dog, const Watched& late) {
    bool other_tells = false;
    const std::string missing = missing_find(dog, late, other_tells);
    for (const double begin = seconds_now(); other_tells && seconds_now() - begin < 2 * Watchdog::answers_s; nap(0.01))
        questions_answer(dog);
    const std::string text = format_text("waited over %g s in '%s', collective %llu of its %s group, for ", late.timeout_s,
                                         late.what, static_cast<unsigned long long>(late.sequence), dog.axis);
    comm_abort(text + (missing.empty() ? "the network: all ranks are in it. Look at NCCL_DEBUG=INFO"
                                       : "rank " + missing + ": is it alive? If it is only slow, raise --comm-timeout"));
}

inline void watch(Watchdog& dog) {
    cudaSetDevice(dog.device);
    for (std::unique_lock lock(dog.mutex); !dog.ending;) {
        lock.unlock();
        questions_answer(dog);
        const std::string error = dog.transport_error();
        if (!error.empty()) comm_abort(format_text("%s group: %s", dog.axis, error.c_str()));
        const Watched running = running_look(dog);
        if (running.sequence && seconds_now() - running.since_s > running.timeout_s) late_tell(dog, running);
        lock.lock();
        dog.wake.wait_for(lock, std::chrono::duration<double>(Watchdog::look_s), [&] { return dog.ending; });
    }
}

}  // namespace watchdog_detail

// Collective.
inline void watchdog_start(Watchdog& dog, const Comm& comm, const Device& device, std::function<std::string()> transport_error) {
    dog.rank = comm.rank;
    dog.size = comm.size;
    dog.axis = comm.axis;
    dog.device = device.index;
    dog.transport_error = std::move(transport_error);
    MPI_Comm_dup(comm.handle, &dog.talk);  // freed by MPI_Finalize: a rank that ends alone must not wait for the others
    MPI_Group group, world;
    MPI_Comm_group(comm.handle, &group);
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    dog.world_ranks.resize(comm.size);
    for (int r = 0; r < comm.size; r++) MPI_Group_translate_ranks(group, 1, &r, world, &dog.world_ranks[r]);
    dog.thread = std::thread([&dog] { watchdog_detail::watch(dog); });
}

inline void watchdog_add(Watchdog& dog, const Watched& watched) {
    const std::lock_guard lock(dog.mutex);
    dog.in_flight.push_back(watched);
}
