// x in the order in which the products of linear_tiles.cuh read it, zeros past its columns: for each block of `rows` rows
// and each chunk of 64 columns [8 columns of the product's k][row][16 bytes], two chunks a step.
//
// Of a half chunk of 32 columns lane q of the weights has the eight from 8 q on; words of them go to columns 2 q of the
// product's eights 0, 1, 2 and 3. Rows past the last are never written: nobody reads their sums.
//
// The workspace has x in that order, if the product does not order it itself, then a flag for each block, then what blocks
// leave to each other. Nobody lowers flags before a launch, which would take another one: a flag is up that has the launch's
// token, 64 bits that no other call has, and who has waited for it lowers it.
#pragma once

#include "linear_x.cuh"

namespace fuseline {

int launch_order_x(const LinearArguments& a, int rows, void* stream);  // linear_tiles_order.cu

}  // namespace fuseline
