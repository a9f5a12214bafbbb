#pragma once
/// How passes are written in texts, pictures and messages.

#include <string>

#include "tessera/pipeline/schedule.hpp"

namespace tessera {

/// 'F', 'B' (whether or not its W is part of it) or 'W'.
char letter_of(Action::Kind kind);
/// "F0", with several chunks "F0a", "F0b", ...
std::string label_of(const Action& action, int chunks);
/// "1f1b: 4 stages, 8 micro-batches, bubble 27.3 %".
std::string title_of(const Schedule& schedule, const Simulation& simulation);

}  // namespace tessera
