#include "tessera/checkpoint/safetensors.hpp"

#include <zlib.h>

#include "scratch.hpp"
#include "tessera/base/error.hpp"

namespace tessera::test {
namespace {

using Safetensors = ScratchTest;

TEST_F(Safetensors, RoundTripOfEveryDtypeInPiecesAndAnyOrder) {
  const DType dtypes[] = {DType::f32, DType::bf16, DType::f16, DType::f64, DType::i32, DType::i64,
                          DType::u32, DType::u16,  DType::i16, DType::i8,  DType::u8};
  std::vector<TensorSpec> specs;
  for (const DType dtype : dtypes) specs.push_back({std::string(name_of(dtype)) + ".\"ä\n", dtype, {3, 7}});
  specs.push_back({"scalar", DType::f32, {}});
  specs.push_back({"empty", DType::f32, {5, 0, 2}});
  SafetensorsWriter writer(dir_ / "a.safetensors", specs,
                           {.metadata = {{"format", "pt"}}, .chunk_bytes = 16});
  for (std::size_t i = specs.size(); i-- > 0;) {
    const auto bytes = random_bytes(specs[i].bytes(), static_cast<unsigned>(i));
    const std::size_t cut = bytes.size() / 3;
    writer.append(specs[i].name, std::span(bytes).first(cut));
    EXPECT_FALSE(writer.complete() && i > 0);
    writer.append(specs[i].name, std::span(bytes).subspan(cut));
  }
  EXPECT_FALSE(fs::exists(dir_ / "a.safetensors"));
  const SafetensorsSummary summary = writer.finish();
  EXPECT_EQ(fs::file_size(dir_ / "a.safetensors"), summary.file_bytes);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_), {}), 1);

  const SafetensorsReader reader(dir_ / "a.safetensors");
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  EXPECT_EQ(reader.data_begin() % 8, 0u);
  ASSERT_EQ(reader.entries().size(), specs.size());
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto& entry = reader.at(specs[i].name);
    EXPECT_EQ(entry.dtype, specs[i].dtype);
    EXPECT_EQ(entry.shape, specs[i].shape);
    EXPECT_EQ(entry.begin % size_of(entry.dtype), 0u) << "aligned";
    std::vector<std::byte> got(specs[i].bytes());
    reader.read(specs[i].name, got);
    EXPECT_EQ(got, random_bytes(got.size(), static_cast<unsigned>(i)));
  }
  const std::string file = slurp(dir_ / "a.safetensors");
  for (const auto& tensor : summary.tensors) {
    for (std::size_t i = 0; i < tensor.crc32.size(); ++i) {
      const std::size_t at = tensor.begin + 16 * i;
      const auto length = static_cast<uInt>(std::min<std::uint64_t>(16, tensor.end - at));
      EXPECT_EQ(tensor.crc32[i], crc32(0, reinterpret_cast<const Bytef*>(file.data() + at), length));
    }
  }
}

TEST_F(Safetensors, LayoutIsThatOfTheReferenceImplementation) {
  // Bytes that the Python package 0.8.0 writes for {"b": f32 [2], "a": bf16 [1], "c": f32 []} with metadata
  // format=pt.
  const std::vector<TensorSpec> specs = {
      {"a", DType::bf16, {1}}, {"c", DType::f32, {}}, {"b", DType::f32, {2}}};
  SafetensorsWriter writer(dir_ / "x", specs, {.metadata = {{"format", "pt"}}, .chunk_bytes = 0});
  for (const auto& spec : specs) writer.append(spec.name, std::vector<std::byte>(spec.bytes(), std::byte{7}));
  writer.finish();
  std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
      R"("c":{"dtype":"F32","shape":[],"data_offsets":[8,12]},"a":{"dtype":"BF16","shape":[1],"data_offsets":[12,14]}})";
  while (header.size() % 8 != 0) header += ' ';
  EXPECT_EQ(slurp(dir_ / "x"), raw_file(header, std::string(14, '\7')));
}

TEST_F(Safetensors, WriterRefusesMisuseAndLeavesNothing) {
  const std::vector<TensorSpec> twice = {{"a", DType::f32, {1}}, {"a", DType::f32, {2}}};
  EXPECT_THROW(SafetensorsWriter(dir_ / "x", twice), InvalidArgument);
  const std::vector<TensorSpec> reserved = {{"__metadata__", DType::f32, {1}}};
  EXPECT_THROW(SafetensorsWriter(dir_ / "x", reserved), InvalidArgument);
  const std::vector<TensorSpec> not_utf8 = {{"\xff", DType::f32, {1}}};
  EXPECT_THROW(SafetensorsWriter(dir_ / "x", not_utf8), InvalidArgument);
  {
    const std::vector<TensorSpec> one = {{"a", DType::f32, {2}}};
    SafetensorsWriter writer(dir_ / "x", one);
    EXPECT_THROW(writer.append("b", {}), InvalidArgument);
    EXPECT_THROW(writer.append("a", random_bytes(9, 1)), InvalidArgument);
    writer.append("a", random_bytes(4, 1));
    expect_error<InvalidArgument>([&] { writer.finish(); }, "'a'", "4 of its 8");
  }
  EXPECT_TRUE(fs::is_empty(dir_));
}

TEST_F(Safetensors, SlicesEqualANaiveCopy) {
  const Shape shape = {5, 3, 4};
  const auto bytes = random_bytes(60 * 2, 3);
  const std::vector<TensorSpec> specs = {{"pad", DType::u8, {3}}, {"t", DType::bf16, shape}};
  SafetensorsWriter writer(dir_ / "x", specs);
  writer.append("t", bytes);
  writer.append("pad", random_bytes(3, 4));
  writer.finish();
  const SafetensorsReader reader(dir_ / "x");
  int cases = 0;
  for (int a = 0; a < 5; ++a)
    for (int b = 0; b < 3; ++b)
      for (int c = 0; c < 4; ++c)
        for (int x = 0; a + x <= 5; x += 2)
          for (int y = 0; b + y <= 3; ++y)
            for (int z = 0; c + z <= 4; ++z, ++cases) {
              std::vector<std::byte> want;
              for (int i = a; i < a + x; ++i)
                for (int j = b; j < b + y; ++j)
                  for (int k = c; k < c + z; ++k)
                    want.insert(want.end(),
                                {bytes[((i * 3 + j) * 4 + k) * 2], bytes[((i * 3 + j) * 4 + k) * 2 + 1]});
              std::vector<std::byte> got(want.size());
              reader.read_slice("t", {{a, b, c}, {x, y, z}}, got);
              ASSERT_EQ(got, want);
            }
  EXPECT_GT(cases, 1000);
  std::vector<std::byte> rows(2 * 24), part(7);
  reader.read_rows("t", 1, 3, rows);
  EXPECT_TRUE(std::equal(rows.begin(), rows.end(), bytes.begin() + 24));
  reader.read_bytes("t", 11, part);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), bytes.begin() + 11));
  EXPECT_THROW(reader.read_slice("t", {{4, 0, 0}, {2, 3, 4}}, rows), InvalidArgument);
  EXPECT_THROW(reader.read_rows("t", 3, 6, rows), InvalidArgument);
  EXPECT_THROW(reader.read_bytes("t", 119, part), InvalidArgument);
  EXPECT_THROW(reader.read("t", rows), InvalidArgument);
  expect_error<CheckpointError>([&] { reader.read("no", rows); }, "x", "'no'");
}

struct Lie {
  const char* label;
  const char* header;
  std::size_t data_bytes;
  const char* reason;
};
class LyingHeader : public ScratchTest, public ::testing::WithParamInterface<Lie> {};

TEST_P(LyingHeader, IsRefusedWithItsReason) {
  spill(dir_ / "lie.safetensors", raw_file(GetParam().header, std::string(GetParam().data_bytes, 'x')));
  expect_error<CheckpointError>([&] { SafetensorsReader reader(dir_ / "lie.safetensors"); },
                                "lie.safetensors", GetParam().reason);
}

#define T(dtype, shape, offsets) "{\"dtype\":" dtype ",\"shape\":" shape ",\"data_offsets\":" offsets "}"
INSTANTIATE_TEST_SUITE_P(
    Safetensors, LyingHeader,
    ::testing::Values(
        Lie{"SizeTooSmall", "{\"a\":" T("\"F32\"", "[2]", "[0,4]") "}", 4, "do not match"},
        Lie{"SizeTooLarge", "{\"a\":" T("\"F32\"", "[2]", "[0,16]") "}", 16, "do not match"},
        Lie{"BeyondEnd", "{\"a\":" T("\"F32\"", "[2]", "[0,8]") "}", 7, "the file holds 7"},
        Lie{"Trailing", "{\"a\":" T("\"F32\"", "[2]", "[0,8]") "}", 9, "tensors end at"},
        Lie{"Hole", "{\"a\":" T("\"U8\"", "[2]", "[0,2]") ",\"b\":" T("\"U8\"", "[2]", "[3,5]") "}", 5,
            "hole"},
        Lie{"HoleAtStart", "{\"a\":" T("\"U8\"", "[2]", "[1,3]") "}", 3, "hole"},
        Lie{"Overlap", "{\"a\":" T("\"U8\"", "[2]", "[0,2]") ",\"b\":" T("\"U8\"", "[2]", "[1,3]") "}", 3,
            "overlap"},
        Lie{"SameBytes", "{\"a\":" T("\"U8\"", "[2]", "[0,2]") ",\"b\":" T("\"U8\"", "[2]", "[0,2]") "}", 2,
            "overlap"},
        Lie{"Reversed", "{\"a\":" T("\"U8\"", "[2]", "[2,0]") "}", 2, "do not match"},
        Lie{"NegativeOffset", "{\"a\":" T("\"U8\"", "[2]", "[-2,0]") "}", 2, "-2"},
        Lie{"NegativeDim", "{\"a\":" T("\"U8\"", "[-2]", "[0,2]") "}", 2, "-2"},
        Lie{"FractionalDim", "{\"a\":" T("\"U8\"", "[2.0]", "[0,2]") "}", 2, "2.0"},
        Lie{"ProductOverflows", "{\"a\":" T("\"U8\"", "[4294967296,4294967296]", "[0,0]") "}", 0,
            "too large"},
        Lie{"BytesOverflow", "{\"a\":" T("\"F64\"", "[2305843009213693952]", "[0,0]") "}", 0, "too large"},
        Lie{"ZeroTimesHuge", "{\"a\":" T("\"U8\"", "[4294967296,4294967296,0]", "[0,0]") "}", 0, "too large"},
        Lie{"DimBeyond63Bits", "{\"a\":" T("\"U8\"", "[18446744073709551615]", "[0,1]") "}", 1, "too large"},
        Lie{"DimBeyond64Bits", "{\"a\":" T("\"U8\"", "[18446744073709551616]", "[0,1]") "}", 1,
            "1844674407370955161"},
        Lie{"OffsetsWrap", "{\"a\":" T("\"U8\"", "[1]", "[18446744073709551615,0]") "}", 1, "do not match"},
        Lie{"UnknownDtype", "{\"a\":" T("\"F8_E4M3\"", "[2]", "[0,2]") "}", 2, "F8_E4M3"},
        Lie{"DtypeNumber", "{\"a\":" T("5", "[2]", "[0,2]") "}", 2, "found the number 5"},
        Lie{"ShapeText", "{\"a\":" T("\"U8\"", "\"2\"", "[0,2]") "}", 2, "found the text"},
        Lie{"OneOffset", "{\"a\":" T("\"U8\"", "[2]", "[2]") "}", 2, "two numbers"},
        Lie{"ThreeOffsets", "{\"a\":" T("\"U8\"", "[2]", "[0,2,2]") "}", 2, "more than two"},
        Lie{"SevenDims", "{\"a\":" T("\"U8\"", "[1,1,1,1,1,1,2]", "[0,2]") "}", 2, "dimensions"},
        Lie{"NestedShape", "{\"a\":" T("\"U8\"", "[[2]]", "[0,2]") "}", 2, "found an array"},
        Lie{"NestedTensor", "{\"a\":{\"b\":" T("\"U8\"", "[2]", "[0,2]") "}}", 2, "unknown key"},
        Lie{"Missing", "{\"a\":{\"dtype\":\"U8\",\"shape\":[2]}}", 2, "missing"},
        Lie{"UnknownKey", "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2],\"x\":1}}", 2,
            "unknown key"},
        Lie{"KeyTwice", "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2,
            "twice"},
        Lie{"NameTwice",
            "{\"a\":" T("\"U8\"", "[2]", "[0,2]") ",\"\\u0061\":" T("\"U8\"", "[2]", "[2,4]") "}", 4,
            "twice"},
        Lie{"NoName", "{\"\":" T("\"U8\"", "[2]", "[0,2]") "}", 2, "without a name"},
        Lie{"MetadataTwice", "{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice"},
        Lie{"MetadataNumber", "{\"__metadata__\":{\"a\":1}}", 0, "text only"},
        Lie{"MetadataObject", "{\"__metadata__\":{\"a\":{}}}", 0, "text only"},
        Lie{"MetadataKeyTwice", "{\"__metadata__\":{\"a\":\"\",\"a\":\"\"}}", 0, "twice"},
        Lie{"TensorNull", "{\"a\":null}", 0, "found null"}, Lie{"NotAnObject", "[]", 0, "'{'"},
        Lie{"LeadingSpace", " {}", 0, "'{'"}, Lie{"Empty", "", 0, "'{'"}, Lie{"Two", "{}{}", 0, "JSON"},
        Lie{"Unclosed", "{\"a\":", 0, "JSON"}, Lie{"BadUtf8", "{\"\xff\":{}}", 0, "JSON"}),
    [](const auto& info) { return info.param.label; });

TEST_F(Safetensors, LengthWordAndFileKindAreChecked) {
  const auto refuse = [&](const std::string& bytes, const char* reason) {
    spill(dir_ / "x", bytes);
    expect_error<CheckpointError>([&] { SafetensorsReader reader(dir_ / "x"); }, reason);
  };
  refuse("", "0 bytes");
  refuse("1234567", "7 bytes");
  refuse(std::string(8, '\xff') + "{}", "claims a header of 18446744073709551615");
  refuse(std::string("\3\0\0\0\0\0\0\0{}", 10), "claims a header of 3");
  refuse(raw_file(std::string("{}\0garbage", 10), ""), "NUL");
  refuse(raw_file(std::string(300'000, '{'), ""), "");  // nesting costs no stack
  refuse(raw_file("{\"a\":" + std::string(300'000, '['), ""), "");
  expect_error<CheckpointError>([&] { SafetensorsReader reader(dir_); }, "regular file");
  expect_error<CheckpointError>([&] { SafetensorsReader reader(dir_ / "none"); }, "no such file");
  spill(dir_ / "x", raw_file("{}      ", ""));
  EXPECT_TRUE(SafetensorsReader(dir_ / "x").entries().empty());
  fs::create_symlink("x", dir_ / "link");
  EXPECT_NO_THROW(SafetensorsReader(dir_ / "link"));
  EXPECT_THROW(SafetensorsReader(dir_ / "link", SymbolicLinks::refuse), CheckpointError);
}

TEST_F(Safetensors, BoolIsReadAsBytes) {
  spill(dir_ / "x", raw_file("{\"m\":" T("\"BOOL\"", "[2]", "[0,2]") "}", std::string("\1\0", 2)));
  const SafetensorsReader reader(dir_ / "x");
  EXPECT_TRUE(reader.at("m").is_bool);
  EXPECT_EQ(reader.at("m").dtype, DType::u8);
}

TEST_F(Safetensors, AFileThatShrinksWhileOpenIsAnError) {
  const std::vector<TensorSpec> one = {{"a", DType::f32, {1000}}};
  SafetensorsWriter writer(dir_ / "x", one);
  writer.append("a", random_bytes(4000, 1));
  writer.finish();
  const SafetensorsReader reader(dir_ / "x");
  fs::resize_file(dir_ / "x", 2000);
  std::vector<std::byte> out(4000);
  expect_error<CheckpointError>([&] { reader.read("a", out); }, "ends before");
}

/// Whatever happens to a file: it is refused, or what it then says is consistent and readable.
TEST_F(Safetensors, MutatedFilesAreRefusedOrConsistent) {
  const std::string valid =
      raw_file("{\"__metadata__\":{\"k\":\"v\"},\"a\":" T("\"F32\"", "[2,3]", "[0,24]") ",\"bb\":" T(
                   "\"BF16\"", "[4]", "[24,32]") ",\"c\":" T("\"U8\"", "[]", "[32,33]") "}",
               std::string(33, 'd'));
  std::mt19937 random(20261121);
  int refused = 0;
  for (int round = 0; round < 1000; ++round) {
    std::string file = valid;
    const int edits = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < edits && !file.empty(); ++i) {
      const std::size_t at = random() % (random() % 4 ? file.size() : std::min<std::size_t>(file.size(), 8));
      switch (random() % 6) {
        case 0:
          file[at] = static_cast<char>(random());
          break;
        case 1:
          file.resize(at);
          break;
        case 2:
          file.erase(at, 1 + random() % 8);
          break;
        case 3:
          file.insert(at, 1, "{}[]\",:0123456789-"[random() % 18]);
          break;
        case 4:
          file[at] = static_cast<char>(file[at] ^ (1 << random() % 8));
          break;
        case 5:
          file.insert(at, file.substr(at, random() % 40));
          break;
      }
    }
    spill(dir_ / "x", file);
    try {
      const SafetensorsReader reader(dir_ / "x");
      std::uint64_t at = reader.data_begin();
      for (const auto& entry : reader.entries()) {
        ASSERT_EQ(entry.begin, at);
        ASSERT_EQ(entry.end - entry.begin,
                  static_cast<std::uint64_t>(entry.shape.numel()) * size_of(entry.dtype));
        std::vector<std::byte> out(entry.end - entry.begin);
        reader.read(entry.name, out);
        at = entry.end;
      }
      ASSERT_EQ(at, file.size());
    } catch (const CheckpointError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 700);
}

}  // namespace
}  // namespace tessera::test
