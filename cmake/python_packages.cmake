# The folders in which the first python3 (or $PYTHON) finds packages: NVIDIA publishes libraries on PyPI as well.
function(tessera_python_packages folders)
  if(NOT DEFINED TESSERA_PYTHON_PACKAGES)
    set(python $ENV{PYTHON})
    if(NOT python)
      set(python python3)
    endif()
    execute_process(
      COMMAND ${python} -c "import site, sys; print(';'.join(p for p in sys.path + [site.getusersitepackages()] if p.endswith('-packages')))"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(TESSERA_PYTHON_PACKAGES "${found}" CACHE INTERNAL "")
  endif()
  set(${folders} ${TESSERA_PYTHON_PACKAGES} PARENT_SCOPE)
endfunction()
