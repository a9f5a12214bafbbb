#pragma once
/// Everything a program that uses the library needs. Tessera's own files include what they use instead.

#include "tessera/autograd/functions.hpp"
#include "tessera/base/config_file.hpp"
#include "tessera/base/version.hpp"
#include "tessera/checkpoint/checkpoint.hpp"
#include "tessera/checkpoint/hf.hpp"
#include "tessera/data/dataset.hpp"
#include "tessera/data/loader.hpp"
#include "tessera/engine/build.hpp"
#include "tessera/engine/engine.hpp"
#include "tessera/engine/generate.hpp"
#include "tessera/engine/pretrained.hpp"
#include "tessera/engine/state.hpp"
#include "tessera/engine/trainer.hpp"
#include "tessera/nn/layers.hpp"
#include "tessera/nn/models/decoder.hpp"
