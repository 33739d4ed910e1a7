#include "module.h"

NB_MODULE(_schedules, module) {
  jgg::define_layouts(module);
  jgg::define_piece_schedules(module);
  jgg::define_schedules(module);
}
