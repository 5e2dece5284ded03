// The door for whoever measures layouts: sets one for the calls of this thread, in place of the table's.

#include "rows/choice.h"

int fuseline_plan_override(int family, int held, int block, int cluster, int stages, int kernel) {
  using fuseline::RowKernel;
  if (family < 0 || family >= FUSELINE_FAMILIES || kernel > int(RowKernel::tiles)) return FUSELINE_UNSUPPORTED;
  if (held < 0 || block < 0 || cluster < 0 || stages < 0 || kernel < 0) return FUSELINE_BAD_SIZE;
  fuseline::row_overrides[family] = {held > 0 || kernel > 0, {INT64_MAX, held, block, cluster, stages, RowKernel(kernel)}};
  return 0;
}
