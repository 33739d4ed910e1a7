# Writes the translation units that kernels are compiled in, and the functions that choose between
# kernels. Both follow from one list: csrc/instances.cmake.
#
# jgg_add_product(<product>
#   NAMESPACE <namespace> ARGUMENTS <type> HEADER <header>)
#
# Adds a function that csrc/ffi calls: cudaError_t <product>(TileConfig, <type> const&,
# cudaStream_t), declared in the header and the namespace. It calls the first of its instances that
# is of the tile's kind and of the element type in the arguments' `type`.
#
# jgg_add_instances(<product> <function>
#   ARCH <architecture> [NAMESPACE <namespace>] HEADER <header> TYPES <element type>...
#   [KINDS <kind>...] [APART] [ADDITIONS_PER_PAUSE <number>])
#
# Compiles a function template of the header for each of the types and for the architecture (90a,
# ...). The template is `template <ElementType>`, with the parameters of the product. One
# translation unit has all types, because headers take longer to compile than a few kernels. With
# APART each type has a translation unit of its own. This is for functions with so many kernels that
# the build would wait for one translation unit. The default of NAMESPACE is that of the product,
# and the default of KINDS is kCooperative. For ADDITIONS_PER_PAUSE see pace_additions.py.
#
# jgg_write_instances(<variable>) writes the sources of the functions that choose. It sets the
# variable to these sources, and <variable>_<architecture> to the sources of the architecture's
# kernels.

set(
  JGG_TYPES ""
  CACHE STRING "Operand types to compile kernels of templates for (bf16, f16, ...); empty: all"
)

function(jgg_add_product product)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "NAMESPACE;ARGUMENTS;HEADER" "")
  set_property(GLOBAL APPEND PROPERTY JGG_PRODUCTS ${product})
  foreach(property NAMESPACE ARGUMENTS HEADER)
    set_property(GLOBAL PROPERTY JGG_${product}_${property} ${arg_${property}})
  endforeach()
endfunction()

# Sets `output_variable` to the name of a type in JGG_TYPES and in file names: bf16 for kBf16.
function(jgg_name_of_type output_variable type)
  string(REGEX REPLACE "^k" "" name ${type})
  string(TOLOWER ${name} name)
  set(${output_variable} ${name} PARENT_SCOPE)
endfunction()

function(jgg_add_instances product function)
  cmake_parse_arguments(
    PARSE_ARGV 2 arg "APART" "ARCH;NAMESPACE;HEADER;ADDITIONS_PER_PAUSE" "TYPES;KINDS"
  )
  if(NOT arg_KINDS)
    set(arg_KINDS kCooperative)
  endif()
  if(NOT arg_NAMESPACE)
    get_property(arg_NAMESPACE GLOBAL PROPERTY JGG_${product}_NAMESPACE)
  endif()
  foreach(key ARCH HEADER TYPES)
    if(NOT arg_${key})
      message(FATAL_ERROR "jgg_add_instances(${product} ${function}) has no ${key}")
    endif()
  endforeach()
  set(JGG_INSTANCES_NAMESPACE ${arg_NAMESPACE})
  get_property(JGG_ARGUMENTS GLOBAL PROPERTY JGG_${product}_ARGUMENTS)
  set(JGG_HEADER ${arg_HEADER})
  set(parameters "(TileConfig, ${JGG_ARGUMENTS} const&, cudaStream_t)")
  string(
    CONCAT declaration
           "namespace ${arg_NAMESPACE} {\n\ntemplate <ElementType>\n"
           "cudaError_t ${function}${parameters};\n\n}  // namespace ${arg_NAMESPACE}\n\n"
  )
  set_property(GLOBAL APPEND_STRING PROPERTY JGG_${product}_DECLARATIONS "${declaration}")
  set(JGG_INSTANCES "")
  foreach(type IN LISTS arg_TYPES)
    jgg_name_of_type(name ${type})
    set_property(GLOBAL APPEND PROPERTY JGG_KNOWN_TYPES ${name})
    if(JGG_TYPES AND NOT name IN_LIST JGG_TYPES)
      continue()
    endif()
    string(
      APPEND JGG_INSTANCES
      "template cudaError_t ${function}<ElementType::${type}>${parameters};\n"
    )
    if(arg_APART)
      jgg_write_instance(${product} ${function}_${name})
      set(JGG_INSTANCES "")
    endif()
    foreach(kind IN LISTS arg_KINDS)
      string(
        CONCAT case
               "  if (config.kind == KernelKind::${kind} && arguments.type == ElementType::${type}) {\n"
               "    return ${arg_NAMESPACE}::${function}<ElementType::${type}>(config, arguments, stream);\n"
               "  }\n"
      )
      set_property(GLOBAL APPEND_STRING PROPERTY JGG_${product}_CASES "${case}")
    endforeach()
  endforeach()
  if(JGG_INSTANCES)
    jgg_write_instance(${product} ${function})
  endif()
endfunction()

# Writes a source of the caller's JGG_INSTANCES.
function(jgg_write_instance product name)
  set(source ${CMAKE_CURRENT_BINARY_DIR}/instances/${product}/${name}.cu)
  configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/instance.cu.in ${source} @ONLY)
  set_property(GLOBAL APPEND PROPERTY JGG_ARCHITECTURES ${arg_ARCH})
  set_property(GLOBAL APPEND PROPERTY JGG_INSTANCES_${arg_ARCH} ${source})
  if(arg_ADDITIONS_PER_PAUSE)
    # Do not compress the machine code, because pace_additions.py could not change it then.
    set_source_files_properties(
      ${source} PROPERTIES COMPILE_DEFINITIONS JGG_ADDITIONS_PER_PAUSE=${arg_ADDITIONS_PER_PAUSE}
                           COMPILE_OPTIONS --no-compress
    )
  endif()
endfunction()

function(jgg_write_instances variable)
  get_property(products GLOBAL PROPERTY JGG_PRODUCTS)
  get_property(architectures GLOBAL PROPERTY JGG_ARCHITECTURES)
  get_property(known_types GLOBAL PROPERTY JGG_KNOWN_TYPES)
  list(REMOVE_DUPLICATES known_types)
  foreach(type IN LISTS JGG_TYPES)
    if(NOT type IN_LIST known_types)
      message(FATAL_ERROR "JGG_TYPES has ${type}, which is none of ${known_types}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES architectures)
  foreach(architecture IN LISTS architectures)
    get_property(instances GLOBAL PROPERTY JGG_INSTANCES_${architecture})
    set(${variable}_${architecture} ${instances} PARENT_SCOPE)
  endforeach()
  set(sources "")
  foreach(JGG_PRODUCT IN LISTS products)
    foreach(property NAMESPACE ARGUMENTS HEADER DECLARATIONS CASES)
      get_property(JGG_${property} GLOBAL PROPERTY JGG_${JGG_PRODUCT}_${property})
    endforeach()
    set(source ${CMAKE_CURRENT_BINARY_DIR}/instances/${JGG_PRODUCT}.cc)
    configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/dispatcher.cc.in ${source} @ONLY)
    list(APPEND sources ${source})
  endforeach()
  set(${variable} ${sources} PARENT_SCOPE)
endfunction()
