# The fuzz targets, tests/fuzz/<name>.cpp, with libFuzzer: fuzz_<name>. Only what reads files and messages is built, all
# of it instrumented. Needs clang; tests/fuzz.sh configures this and runs them.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "TESSERA_FUZZ needs clang: -DCMAKE_CXX_COMPILER=clang++")
endif()
set(fuzz_sanitizers address,undefined,float-cast-overflow)
set(fuzz_flags -O2 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all -fsanitize=${fuzz_sanitizers})

# What the targets need, and no more: a new target names its reader here.
file(GLOB readers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/base/*.cpp ${PROJECT_SOURCE_DIR}/src/base/families/*.cpp)
foreach(source
    data/file data/indexed_dataset data/int_array data/npy data/index_check data/json_depth data/json_texts
    data/tokenizer_options data/tokenizer_record data/python_tokenizer data/worker_process
    checkpoint/file_io checkpoint/json_strict checkpoint/slice_runs checkpoint/safetensors_header checkpoint/manifest
    checkpoint/weight_index checkpoint/hf_config checkpoint/hf_config_json checkpoint/hf_keys checkpoint/hf_names checkpoint/hf_rope checkpoint/hf_window checkpoint/model_json
    checkpoint/tessera_folder checkpoint/pickle checkpoint/zip_archive checkpoint/torch_file checkpoint/torch_json
    checkpoint/megatron_args checkpoint/megatron_training checkpoint/megatron_values checkpoint/megatron_reader checkpoint/megatron_check
    checkpoint/megatron_parts checkpoint/megatron_names checkpoint/megatron_distributed checkpoint/megatron_optimizer
    checkpoint/megatron_groups checkpoint/megatron_run checkpoint/megatron_buffer checkpoint/convert_floats
    checkpoint/dcp_folder checkpoint/deepspeed_folder checkpoint/torch_folders checkpoint/parts_storage checkpoint/hf_storage checkpoint/safetensors_reader checkpoint/sharded_reader
    comm/resolve comm/store_wire comm/store_requests comm/store_barriers
    launch/launch_file launch/file_values launch/accelerate_file launch/accelerate_keys launch/environment
    launch/settings launch/command)
  list(APPEND readers ${PROJECT_SOURCE_DIR}/src/${source}.cpp)
endforeach()
add_library(tessera_readers STATIC ${readers})
target_compile_options(tessera_readers PRIVATE ${fuzz_flags} -fsanitize=fuzzer-no-link)
# Distances between words teach the fuzzer nothing, and would take most of its time.
set_source_files_properties(${PROJECT_SOURCE_DIR}/src/base/suggest.cpp PROPERTIES COMPILE_OPTIONS -fno-sanitize=all)
target_link_libraries(tessera_readers PUBLIC tessera_flags yaml-cpp spdlog::spdlog OpenSSL::Crypto
  nlohmann_json::nlohmann_json ZLIB::ZLIB)

file(GLOB targets CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/*.cpp)
list(FILTER targets EXCLUDE REGEX "_test\\.cpp$")
foreach(source ${targets})
  get_filename_component(name ${source} NAME_WE)
  add_executable(fuzz_${name} ${source})
  target_compile_options(fuzz_${name} PRIVATE ${fuzz_flags} -fsanitize=fuzzer)
  target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer,${fuzz_sanitizers})
  target_link_libraries(fuzz_${name} PRIVATE tessera_readers)
endforeach()
