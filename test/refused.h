// A call that must be refused, with a message that says certain things.
#pragma once
#include <doctest/doctest.h>

#include <functional>
#include <string>
#include <vector>

#include "llmc/check.h"

// The call must throw an Error whose text holds all the words.
inline void refused(const std::function<void()>& call, const std::vector<std::string>& words) {
    std::string text;
    try {
        call();
    } catch (const Error& e) {
        text = e.what();
    }
    REQUIRE_MESSAGE(!text.empty(), "nothing was refused");
    for (const auto& word : words) CHECK_MESSAGE(text.find(word) != std::string::npos, text << "\nhas no \"" << word << "\"");
}
