// How long work on streams takes: spans between two events, collected without waiting and resolved once a step. Each may
// add to a sum of seconds, and is drawn in the timeline if there is one (trace.h).
//
//   { SpanScope span(spans, "block_forward", "compute", stream);  ...work... }
//   spans_resolve(spans, stream);   // at the end of a step: waits for them
#pragma once
#include <exception>
#include <vector>

#include "llmc/device.h"
#include "llmc/trace.h"

struct Span {
    const char *name, *category;  // as in TraceEvent
    double* total_s;              // added to; null: not wanted
    Event begin, end;
};

struct Spans {
    Trace* trace = nullptr;
    EventPool events;
    std::vector<Span> list;
    Event origin;
    double origin_s = 0;  // the host's time, seconds_now(), at `origin`; 0: not known yet
};

// Adds up what was collected. The timeline finds the host's time in the stream's by an origin, which is taken anew each time:
// events tell float32 milliseconds from it.
inline void spans_resolve(Spans& spans, Stream stream) {
    for (const Span& span : spans.list) {
        const double seconds = event_seconds(span.begin, span.end);
        if (span.total_s) *span.total_s += seconds;
        if (!spans.trace || spans.origin_s == 0) continue;
        const double begin = spans.origin_s + event_seconds(spans.origin, span.begin);
        trace_add(spans.trace, span.name, span.category, begin, begin + seconds);
    }
    spans.list.clear();
    spans.origin = event_take(spans.events);
    event_record(spans.origin, stream);
    stream_synchronize(stream);
    spans.origin_s = seconds_now();
}

inline void span_add(Spans& spans, const Span& span, Stream stream) {
    spans.list.push_back(span);
    if (spans.list.size() >= size_t(1) << 14) spans_resolve(spans, stream);  // long work without steps, as in validation
}

struct SpanScope {
    Spans& spans;
    Span span;
    Stream stream;

    SpanScope(Spans& spans, const char* name, const char* category, Stream stream, double* total_s = nullptr)
        : spans(spans), span{name, category, total_s, event_take(spans.events), event_take(spans.events)}, stream(stream) {
        event_record(span.begin, stream);
    }
    SpanScope(const SpanScope&) = delete;
    SpanScope& operator=(const SpanScope&) = delete;
    ~SpanScope() noexcept(false) {
        if (std::uncaught_exceptions() > 0) return;
        event_record(span.end, stream);
        span_add(spans, span, stream);
    }
};
