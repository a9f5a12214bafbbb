# One library out of all floors: tessera::tessera. Shared by default, so that a program that links it needs only the
# headers of include/tessera and nothing of what the library itself is built from.
option(BUILD_SHARED_LIBS "Build libtessera.so; OFF builds libtessera.a" ON)

add_library(tessera)
add_library(tessera::tessera ALIAS tessera)
foreach(floor ${TESSERA_FLOORS})
  target_sources(tessera PRIVATE $<TARGET_OBJECTS:tessera_${floor}>)
endforeach()
set_target_properties(tessera PROPERTIES LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
target_link_libraries(tessera PRIVATE $<BUILD_INTERFACE:tessera_flags> ${TESSERA_LIBRARIES})
target_compile_features(tessera PUBLIC cxx_std_20)
target_include_directories(tessera INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
if(TESSERA_SANITIZE)
  target_link_options(tessera INTERFACE $<BUILD_INTERFACE:-fsanitize=${TESSERA_SANITIZE}>)
endif()

# The program: only a main() around cli_main, which the Python wheel's console script calls as well.
if(EXISTS ${PROJECT_SOURCE_DIR}/src/main.cpp)
  add_executable(tessera_program ${PROJECT_SOURCE_DIR}/src/main.cpp)
  target_link_libraries(tessera_program PRIVATE tessera_flags tessera::tessera)
  set_target_properties(tessera_program PROPERTIES OUTPUT_NAME tessera RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}
    INSTALL_RPATH "$ORIGIN/../lib")
endif()
