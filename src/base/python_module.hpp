#pragma once
#include <string>
#include <vector>

namespace tessera {

/// The words that run a module of Tessera's package by `python`, as `python -m MODULE` would, except that
/// nothing is imported from the current folder: a json.py that lies there is none of ours. (-P, which does
/// the same, is of Python 3.11; -I would leave PYTHONPATH out as well.) The module's arguments follow.
std::vector<std::string> python_module(const std::string& python, const std::string& module);

}  // namespace tessera
