#include "tessera/cli/cli.hpp"

int main(int argc, char** argv) { return tessera::cli_main({argv + 1, argv + argc}); }
