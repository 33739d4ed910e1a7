# Finds what the build takes from Python packages: nanobind, CUTLASS and the XLA FFI headers.
#
# Sets nanobind_DIR, JGG_CUTLASS_INCLUDE_DIR and JGG_XLA_FFI_INCLUDE_DIR. Python knows where each of
# them is: pip installs what a backend asks for into another folder than the backend itself.

# Sets `output_variable` to the path of `file` in the directory of an installed Python package.
function(jgg_find_in_python_package output_variable package file)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/find_in_package.py
            ${package} ${file}
    OUTPUT_VARIABLE path
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY
  )
  message(STATUS "Using ${path}")
  set(${output_variable} ${path} PARENT_SCOPE)
endfunction()

jgg_find_in_python_package(nanobind_DIR nanobind cmake)
jgg_find_in_python_package(JGG_CUTLASS_INCLUDE_DIR cutlass_library source/include)
jgg_find_in_python_package(JGG_XLA_FFI_INCLUDE_DIR jaxlib include)
