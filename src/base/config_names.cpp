#include "base/config_names.hpp"

#include <algorithm>
#include <array>

#include "tessera/base/families.hpp"

namespace tessera {

namespace {

constexpr EnumName<PositionKind> kPositions[] = {{PositionKind::learned, "learned"},
                                                 {PositionKind::rotary, "rotary"},
                                                 {PositionKind::alibi, "alibi"},
                                                 {PositionKind::none, "none"},
                                                 {PositionKind::relative, "relative"}};

constexpr EnumName<NormStyle> kNorms[] = {{NormStyle::layernorm, "layernorm"},
                                          {NormStyle::rmsnorm, "rmsnorm"}};

constexpr EnumName<MlpActivation> kActivations[] = {{MlpActivation::gelu_tanh, "gelu_tanh"},
                                                    {MlpActivation::gelu, "gelu"},
                                                    {MlpActivation::relu, "relu"},
                                                    {MlpActivation::swiglu, "swiglu"},
                                                    {MlpActivation::geglu, "geglu"}};

constexpr EnumName<QkNorm> kQkNorms[] = {
    {QkNorm::none, "none"}, {QkNorm::head, "head"}, {QkNorm::full, "full"}};

constexpr EnumName<NormPlacement> kNormPlacements[] = {
    {NormPlacement::pre, "pre"}, {NormPlacement::sandwich, "sandwich"}, {NormPlacement::post, "post"}};

constexpr EnumName<ProblemType> kProblemTypes[] = {
    {ProblemType::regression, "regression"},
    {ProblemType::single_label_classification, "single_label_classification"},
    {ProblemType::multi_label_classification, "multi_label_classification"}};

constexpr EnumName<RopeType> kRopeTypes[] = {{RopeType::llama3, "llama3"},
                                             {RopeType::linear, "linear"},
                                             {RopeType::dynamic, "dynamic"},
                                             {RopeType::yarn, "yarn"},
                                             {RopeType::longrope, "longrope"}};

constexpr EnumName<Precision> kPrecisions[] = {
    {Precision::fp32, "fp32"}, {Precision::bf16, "bf16"}, {Precision::fp16, "fp16"}};
constexpr LaterName kLaterPrecisions[] = {{"fp8", "use bf16 or fp32"}};

constexpr EnumName<Recompute> kRecompute[] = {{Recompute::none, "none"},
                                              {Recompute::selective, "selective"},
                                              {Recompute::full, "full"},
                                              {Recompute::automatic, "auto"}};
constexpr EnumName<ZeroReshard> kZeroReshards[] = {
    {ZeroReshard::automatic, "auto"}, {ZeroReshard::always, "always"}, {ZeroReshard::never, "never"}};
constexpr EnumName<ContextMethod> kContextMethods[] = {{ContextMethod::automatic, "auto"},
                                                       {ContextMethod::all_gather, "all_gather"},
                                                       {ContextMethod::ulysses, "ulysses"}};
constexpr LaterName kLaterContextMethods[] = {{"ring", "use auto, all_gather or ulysses: the same numbers"}};
constexpr EnumName<RecomputeMethod> kRecomputeMethods[] = {{RecomputeMethod::uniform, "uniform"},
                                                           {RecomputeMethod::block, "block"}};

constexpr auto kScheduleNames = [] {
  std::array<EnumName<PipelineSchedule>, std::size(kScheduleTraits)> names{};
  std::ranges::transform(kScheduleTraits, names.begin(), [](const ScheduleTraits& traits) {
    return EnumName<PipelineSchedule>{traits.kind, traits.name};
  });
  return names;
}();

constexpr EnumName<OffloadTo> kOffloads[] = {
    {OffloadTo::none, "none"}, {OffloadTo::cpu, "cpu"}, {OffloadTo::nvme, "nvme"}};

constexpr EnumName<OptimizerName> kOptimizers[] = {
    {OptimizerName::adamw, "adamw"}, {OptimizerName::adam, "adam"}, {OptimizerName::sgd, "sgd"}};

constexpr EnumName<LrStyle> kLrStyles[] = {{LrStyle::constant, "constant"},
                                           {LrStyle::linear, "linear"},
                                           {LrStyle::cosine, "cosine"},
                                           {LrStyle::inverse_sqrt, "inverse-square-root"},
                                           {LrStyle::wsd, "wsd"}};

constexpr EnumName<WsdStyle> kWsdStyles[] = {{WsdStyle::linear, "linear"},
                                             {WsdStyle::cosine, "cosine"},
                                             {WsdStyle::exponential, "exponential"},
                                             {WsdStyle::minus_sqrt, "minus_sqrt"}};

constexpr EnumName<WeightDecayStyle> kWeightDecayStyles[] = {{WeightDecayStyle::constant, "constant"},
                                                             {WeightDecayStyle::linear, "linear"},
                                                             {WeightDecayStyle::cosine, "cosine"}};

constexpr EnumName<DeviceChoice> kDevices[] = {
    {DeviceChoice::automatic, "auto"}, {DeviceChoice::cpu, "cpu"}, {DeviceChoice::cuda, "cuda"}};

constexpr EnumName<AutoSwitch> kAutoSwitches[] = {
    {AutoSwitch::automatic, "auto"}, {AutoSwitch::off, "false"}, {AutoSwitch::on, "true"}};

constexpr EnumName<DataLoading> kDataLoadings[] = {
    {DataLoading::mmap, "mmap"}, {DataLoading::cached, "cached"}, {DataLoading::lazy, "lazy"}};

template <typename E>
std::string_view find_name(E value) {
  for (const EnumName<E>& entry : names_of(value).values) {
    if (entry.value == value) return entry.name;
  }
  return "unknown";
}

}  // namespace

EnumNames<Family> names_of(Family) {
  static const std::vector<EnumName<Family>> known = [] {
    std::vector<EnumName<Family>> list;
    for (const ModelSpec& row : families()) {
      if (row.is_family()) list.push_back({row.family, row.name});
    }
    return list;
  }();
  return {known, {}};
}
EnumNames<PositionKind> names_of(PositionKind) { return {kPositions, {}}; }
EnumNames<NormStyle> names_of(NormStyle) { return {kNorms, {}}; }
EnumNames<MlpActivation> names_of(MlpActivation) { return {kActivations, {}}; }
EnumNames<QkNorm> names_of(QkNorm) { return {kQkNorms, {}}; }
EnumNames<NormPlacement> names_of(NormPlacement) { return {kNormPlacements, {}}; }
EnumNames<ProblemType> names_of(ProblemType) { return {kProblemTypes, {}}; }
EnumNames<RopeType> names_of(RopeType) { return {kRopeTypes, {}}; }
EnumNames<Precision> names_of(Precision) { return {kPrecisions, kLaterPrecisions}; }
EnumNames<Recompute> names_of(Recompute) { return {kRecompute, {}}; }
EnumNames<RecomputeMethod> names_of(RecomputeMethod) { return {kRecomputeMethods, {}}; }
EnumNames<ZeroReshard> names_of(ZeroReshard) { return {kZeroReshards, {}}; }
EnumNames<ContextMethod> names_of(ContextMethod) { return {kContextMethods, kLaterContextMethods}; }
EnumNames<PipelineSchedule> names_of(PipelineSchedule) { return {kScheduleNames, {}}; }
EnumNames<OffloadTo> names_of(OffloadTo) { return {kOffloads, {}}; }
EnumNames<OptimizerName> names_of(OptimizerName) { return {kOptimizers, {}}; }
EnumNames<LrStyle> names_of(LrStyle) { return {kLrStyles, {}}; }
EnumNames<WsdStyle> names_of(WsdStyle) { return {kWsdStyles, {}}; }
EnumNames<WeightDecayStyle> names_of(WeightDecayStyle) { return {kWeightDecayStyles, {}}; }
EnumNames<DeviceChoice> names_of(DeviceChoice) { return {kDevices, {}}; }
EnumNames<AutoSwitch> names_of(AutoSwitch) { return {kAutoSwitches, {}}; }
EnumNames<DataLoading> names_of(DataLoading) { return {kDataLoadings, {}}; }

std::string_view name_of(Family value) { return value.name; }
std::string_view name_of(PositionKind value) { return find_name(value); }
std::string_view name_of(NormStyle value) { return find_name(value); }
std::string_view name_of(MlpActivation value) { return find_name(value); }
std::string_view name_of(QkNorm value) { return find_name(value); }
std::string_view name_of(NormPlacement value) { return find_name(value); }
std::string_view name_of(ProblemType value) { return find_name(value); }
std::string_view name_of(RopeType value) { return find_name(value); }
std::string_view name_of(Precision value) { return find_name(value); }
std::string_view name_of(Recompute value) { return find_name(value); }
std::string_view name_of(RecomputeMethod value) { return find_name(value); }
std::string_view name_of(ZeroReshard value) { return find_name(value); }
std::string_view name_of(ContextMethod value) { return find_name(value); }
std::string_view name_of(OffloadTo value) { return find_name(value); }
std::string_view name_of(OptimizerName value) { return find_name(value); }
std::string_view name_of(LrStyle value) { return find_name(value); }
std::string_view name_of(WsdStyle value) { return find_name(value); }
std::string_view name_of(WeightDecayStyle value) { return find_name(value); }
std::string_view name_of(DeviceChoice value) { return find_name(value); }
std::string_view name_of(AutoSwitch value) { return find_name(value); }
std::string_view name_of(DataLoading value) { return find_name(value); }

}  // namespace tessera
