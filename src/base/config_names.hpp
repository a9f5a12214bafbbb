#pragma once
/// The YAML spelling of every enumeration, and the values that are known but not in this build yet.

#include <concepts>
#include <span>
#include <string_view>
#include <type_traits>

#include "tessera/base/config.hpp"

namespace tessera {

/// One of a few words in the YAML.
template <typename E>
concept IsChoice = std::is_enum_v<E> || std::same_as<E, Family>;

template <typename E>
struct EnumName {
  E value;
  std::string_view name;
};

/// A value or key that a later version will have: refused by name, never ignored.
struct LaterName {
  std::string_view name;
  std::string_view instead;  ///< what to do now
};

template <typename E>
struct EnumNames {
  std::span<const EnumName<E>> values;
  std::span<const LaterName> later;
};

EnumNames<Family> names_of(Family);
EnumNames<PositionKind> names_of(PositionKind);
EnumNames<NormStyle> names_of(NormStyle);
EnumNames<MlpActivation> names_of(MlpActivation);
EnumNames<QkNorm> names_of(QkNorm);
EnumNames<NormPlacement> names_of(NormPlacement);
EnumNames<ProblemType> names_of(ProblemType);
EnumNames<RopeType> names_of(RopeType);
EnumNames<Precision> names_of(Precision);
EnumNames<Recompute> names_of(Recompute);
EnumNames<RecomputeMethod> names_of(RecomputeMethod);
EnumNames<ZeroReshard> names_of(ZeroReshard);
EnumNames<ContextMethod> names_of(ContextMethod);
EnumNames<PipelineSchedule> names_of(PipelineSchedule);
EnumNames<OffloadTo> names_of(OffloadTo);
EnumNames<OptimizerName> names_of(OptimizerName);
EnumNames<LrStyle> names_of(LrStyle);
EnumNames<WsdStyle> names_of(WsdStyle);
EnumNames<WeightDecayStyle> names_of(WeightDecayStyle);
EnumNames<DeviceChoice> names_of(DeviceChoice);
EnumNames<AutoSwitch> names_of(AutoSwitch);
EnumNames<DataLoading> names_of(DataLoading);

}  // namespace tessera
