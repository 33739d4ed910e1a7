# Enables C++, or stops with a message that says what is missing.

include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  message(
    FATAL_ERROR
    "No C++ compiler was found ($CXX, c++, g++, clang++). The build needs a C++20 compiler: "
    "g++ 11 or clang++ 14, or newer. Install one (apt install g++), or name one in the environment "
    "variable CXX."
  )
endif()
enable_language(CXX)
if(
  (CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  OR (CMAKE_CXX_COMPILER_ID STREQUAL Clang AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
)
  message(
    FATAL_ERROR
    "${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}: the build needs "
    "g++ 11 or clang++ 14, or newer. Name one in the environment variable CXX."
  )
endif()
