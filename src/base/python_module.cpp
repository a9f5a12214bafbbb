#include "base/python_module.hpp"

#include "tessera/base/error.hpp"

namespace tessera {

std::vector<std::string> python_module(const std::string& python, const std::string& module) {
  return {python, "-c",
          detail::concat("import sys; sys.path[:] = [p for p in sys.path if p not in ('', '.')]\n"
                         "import importlib.util, runpy\n"
                         "if importlib.util.find_spec('tessera') is None:\n"
                         "    sys.exit(sys.executable + ': No module named tessera')\n"
                         "runpy.run_module('",
                         module, "', run_name='__main__', alter_sys=True)")};
}

}  // namespace tessera
