# Finds what the build takes from Python packages: CUTLASS, the XLA FFI headers and, when the machine
# has none of its own, the CUDA compiler. To be included before CUDA is enabled.
#
# Sets JGG_CUTLASS_INCLUDE_DIR, JGG_XLA_FFI_INCLUDE_DIR and, unless CUDACXX or CMAKE_CUDA_COMPILER
# already name a compiler, CMAKE_CUDA_COMPILER.

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

jgg_find_in_python_package(JGG_CUTLASS_INCLUDE_DIR cutlass_library source/include)
jgg_find_in_python_package(JGG_XLA_FFI_INCLUDE_DIR jaxlib include)

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  # Only PATH: a toolkit that its user has not put there is not the one to build with.
  find_program(
    JGG_NVCC nvcc
    NO_PACKAGE_ROOT_PATH NO_CMAKE_PATH NO_CMAKE_ENVIRONMENT_PATH NO_CMAKE_SYSTEM_PATH
  )
  if(JGG_NVCC)
    set(CMAKE_CUDA_COMPILER ${JGG_NVCC})
  else()
    jgg_find_in_python_package(CMAKE_CUDA_COMPILER nvidia.cu13 bin/nvcc)
    # The wheels keep their libraries in lib, where this nvcc expects lib64.
    cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH bin_dir)
    string(APPEND CMAKE_CUDA_FLAGS " -L${bin_dir}/../lib")
  endif()
endif()
